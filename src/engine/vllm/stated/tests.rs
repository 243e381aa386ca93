use super::*;
use crate::client::testing::{Script, serve};
use crate::config::testing::{cpu, sim};
use crate::failure::Class;

fn dense() -> Geometry {
    Geometry::of(&cpu(&[]).profile)
}

fn hybrid(groups: &str) -> Geometry {
    let flags = [
        "--hit-block-tokens",
        "256",
        "--page-bytes",
        "131072",
        "--ssm-groups",
        groups,
    ];
    Geometry::of(&cpu(&flags).profile)
}

fn info(labels: &str) -> Page {
    Page::parse(&format!("{INFO}{{engine=\"0\",{labels}}} 1\n"))
}

const DENSE: &str = r#"block_size="64",mamba_cache_mode="none",mamba_page_size_padded="None""#;
const HYBRID: &str = r#"block_size="256",mamba_cache_mode="align",mamba_page_size_padded="131072""#;
const LOG: &str = "(EngineCore pid=7) INFO 11-30 [kv_cache_utils.py:853] kv cache group sizes (256, 256, 256, 256)\n";

fn page_and_log(page: &str, log: &str) -> Vec<Statement> {
    let mut stated = on_page("worker0", &info(page));
    stated.extend(in_log("worker0", log));
    stated
}

#[test]
fn agreement_is_silent() {
    assert_eq!(
        compare("worker0", dense(), &page_and_log(DENSE, "")),
        Ok(())
    );
    let stated = page_and_log(HYBRID, LOG);
    // Three of the page, the number of groups, and the block of each.
    assert_eq!(stated.len(), 8);
    assert_eq!(compare("worker0", hybrid("3"), &stated), Ok(()));
    let unknown = Geometry::of(&cpu(&["--model-path", "/m", "--hit-block-tokens", "256"]).profile);
    assert_eq!(compare("worker0", unknown, &stated), Ok(()));
}

#[test]
fn what_is_not_stated_says_nothing() {
    for page in [
        "",
        "x 1\n",
        "vllm:cache_config_info{block_size=\"None\"} 1\n",
    ] {
        assert_eq!(on_page("worker0", &Page::parse(page)), []);
    }
    for log in [
        "",
        "kv cache group sizes",
        "kv cache group sizes (x, 3)",
        "kv cache group sizes ()",
    ] {
        assert_eq!(in_log("worker0", log), [], "{log}");
    }
    let card = |value: &str| Page::parse(&format!("{CARD}{{model=\"tiny\"}} {value}\n"));
    assert_eq!(on_card("other", &card("64")).map(|it| it.says), None);
    assert_eq!(on_card("tiny", &card("0")).map(|it| it.says), None);
    assert_eq!(
        on_card("tiny", &card("64")).map(|it| it.says),
        Some(Says::Block(64))
    );
}

#[test]
fn the_last_start_of_an_engine_counts() {
    let log = format!("{LOG}kv cache group sizes (64,)\nkv lcm block sizes 64\n");
    let says: Vec<Says> = in_log("w", &log).into_iter().map(|it| it.says).collect();
    assert_eq!(says, [Says::StateGroups(0), Says::Block(64)]);
}

#[test]
fn each_disagreement_is_the_environments_and_names_the_flag() {
    for (geometry, page, log, expected) in [
        (
            dense(),
            HYBRID,
            LOG,
            [
                "worker0 has another KV geometry than configured; expected hit blocks of 64 tokens, 0 state groups",
                "found 256 tokens (worker0: vllm:cache_config_info{block_size}), at least one",
                "--hit-block-tokens 256",
            ],
        ),
        (
            hybrid("3"),
            r#"mamba_cache_mode="none""#,
            "",
            [
                "expected 3 state groups",
                "found none (worker0: vllm:cache_config_info{mamba_cache_mode})",
                "--ssm-groups 0",
            ],
        ),
        (
            hybrid("2"),
            HYBRID,
            LOG,
            [
                "expected 2 state groups",
                "found 3 state groups (worker0: its log",
                "--ssm-groups 3",
            ],
        ),
        (
            hybrid("3"),
            r#"mamba_page_size_padded="131073""#,
            "",
            [
                "expected pages of 131072 B",
                "found 131073 B for each layer of a group",
                "--page-bytes of 131073 times",
            ],
        ),
    ] {
        let failure = compare("worker0", geometry, &page_and_log(page, log)).unwrap_err();
        assert_eq!(failure.class, Class::Environment);
        let text = failure.to_string();
        for words in expected {
            assert!(text.contains(words), "{words}: {text}");
        }
    }
}

/// Eight layers of a group, each with its part of the page.
#[test]
fn a_page_is_its_layers() {
    let flags = [
        "--hit-block-tokens",
        "576",
        "--page-bytes",
        "18874368",
        "--ssm-groups",
        "3",
    ];
    let qwen = Geometry::of(&cpu(&flags).profile);
    assert_eq!(disagreement(qwen, Says::LayerPage(2_359_296)), None);
    assert!(disagreement(qwen, Says::LayerPage(2_359_297)).is_some());
}

#[test]
fn the_model_card_is_compared_too() {
    let card = Page::parse(&format!("{CARD}{{model=\"tiny\"}} 128\n"));
    let stated: Vec<_> = on_card("tiny", &card).into_iter().collect();
    let text = compare("worker0", dense(), &stated)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("frontend: dynamo_frontend_model_kv_cache_block_size"),
        "{text}"
    );
    let simulated = Geometry::of(&sim(&["--block-tokens", "128"]).profile);
    assert_eq!(compare("worker0", simulated, &stated), Ok(()));
}

/// A front door and two workers in one server. The first page comes late.
async fn examined(second: &str, log: &str) -> Result<(), Failure> {
    let page = |labels: &str| format!("{INFO}{{{labels}}} 1\n");
    let script = Script::from([
        ("/metrics", vec![(503, String::new()), (200, String::new())]),
        ("/w0", vec![(200, page(HYBRID))]),
        ("/w1", vec![(200, page(second))]),
    ]);
    let url = serve(script).await;
    let workers = [0, 1].map(|index| WorkerInfo {
        process: format!("worker{index}"),
        index,
        instance_id: 7,
        served_model: "tiny".into(),
        serves: crate::plan::Serves::Whole,
        metrics_url: format!("{url}/w{index}"),
        probes_ms: 0,
        ready_ms: 0,
    });
    let logs = tempfile::tempdir().unwrap();
    std::fs::write(logs.path().join("worker0.log"), LOG).unwrap();
    std::fs::write(logs.path().join("worker1.log"), log).unwrap();
    examine(hybrid("3"), &url, &workers, logs.path(), &|_| ()).await
}

#[tokio::test]
async fn every_worker_is_read_its_page_and_its_log() {
    assert_eq!(examined(HYBRID, LOG).await, Ok(()));
    let page = examined(DENSE, LOG).await.unwrap_err();
    assert!(page.what.starts_with("worker1 has another"), "{page}");
    let log = examined(HYBRID, "kv cache group sizes (256, 256)\n")
        .await
        .unwrap_err();
    assert!(
        log.to_string().contains("1 state groups (worker1: its log"),
        "{log}"
    );
}
