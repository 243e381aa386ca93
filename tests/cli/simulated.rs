//! The simulated stack as a user meets it: when it is chosen, what it says, what it can be told.
//!
//! Where a test needs an arm to end early, it names a state directory that cannot be used.

use kvcr_phase1::cases::PHASE1;
use kvcr_phase1::sim::NOTICE;
use kvcr_phase1::sim::fault::CATALOGUE;

use crate::place::{Place, Said, read_json};
use crate::promises;

promises![
    without_the_product_the_tests_take_the_simulated_stack_and_say_so,
    whoever_names_or_requires_the_product_gets_no_other,
    names_are_the_same_for_nextest_and_marked_for_people,
    a_choice_that_moved_since_it_was_listed_is_a_failure,
    a_run_says_that_it_is_simulated_wherever_it_says_anything,
    a_run_still_means_the_product,
    its_plan_and_its_doctor_say_what_it_is,
    nothing_can_be_installed_for_it,
    the_lies_are_listed_and_a_wrong_one_names_the_nearest,
    where_no_stack_runs_nothing_is_told,
    a_process_is_not_simulated_by_a_wrong_name,
];

/// The four words that tell people how to get the product.
const INSTEAD: &str = "`kvcr-phase1 run --profile cpu`, or `cargo run --release -- run`";

/// The test binary where no stack can start.
fn without_a_stack(place: &Place, args: &[&str]) -> Said {
    let file = place.file("file", "");
    let phase1 = place.phase1(args).var("PHASE1_STATE_DIR", &file);
    phase1.said()
}

fn first_arm() -> &'static str {
    PHASE1[0].arms[0].name
}

fn without_the_product_the_tests_take_the_simulated_stack_and_say_so() {
    for place in [Place::with_python(), Place::bare()] {
        let list = place
            .phase1(&["--list", "--format", "terse", "--ignored"])
            .said();
        list.succeeds(&[]);
        let other_stack = [
            "tc02::seed_prefix",
            "tc02::extra",
            "tc02::evict",
            "tc04",
            "tc05::guard",
            "tc06",
        ];
        for line in list.out.lines() {
            assert!(other_stack.iter().any(|it| line.starts_with(it)), "{line}");
        }
        assert_eq!(list.err.lines().count(), 1, "{list:?}");
        for words in [
            "the `cpu` environment is not installed",
            "simulated stack",
            "never the product",
            INSTEAD,
        ] {
            assert!(list.err.contains(words), "no {words:?} in {list:?}");
        }
    }
}

fn whoever_names_or_requires_the_product_gets_no_other() {
    let place = Place::with_python();
    for (name, value) in [
        ("PHASE1_PROFILE", "cpu"),
        ("PHASE1_PYTHON", "/nowhere/python"),
        ("PHASE1_REQUIRE", "tc01"),
    ] {
        let said = place.phase1(&[]).var(name, value).said();
        assert!([Some(3), Some(101)].contains(&said.code), "{said:?}");
        assert!(!said.err.contains("simulated"), "{name}: {said:?}");
    }
    // The line is for those who did not ask.
    let asked = place.phase1(&["--list", "--profile", "sim"]).said();
    assert_eq!((asked.code, asked.err.as_str()), (Some(0), ""));
}

fn names_are_the_same_for_nextest_and_marked_for_people() {
    let place = Place::with_python();
    let arm = first_arm();
    let list = |args: &[&str]| place.phase1(args).said().out;
    let terse = ["--list", "--format", "terse"];
    let simulated = list(&[terse.as_slice(), &["--profile", "sim"]].concat());
    let real = list(&[terse.as_slice(), &["--profile", "cpu"]].concat());
    assert_eq!(simulated, real);

    // The name alone still selects.
    let said = without_a_stack(&place, &["--exact", arm]);
    assert_eq!(said.code, Some(101), "{said:?}");
    let line = format!("test [sim] {arm} ");
    assert!(said.out.contains(&line), "{said:?}");
    assert!(said.out.contains(NOTICE), "{said:?}");
    assert!(said.err.contains(&format!("harness: {NOTICE}")), "{said:?}");

    let exact = ["--exact", arm, "--nocapture"];
    let said = place
        .phase1(&exact)
        .var("PHASE1_STATE_DIR", &place.text("file"))
        .under_nextest("r")
        .said();
    assert_eq!(said.code, Some(101), "{said:?}");
    assert!(!said.out.contains("[sim]"), "{said:?}");
    assert!(said.out.contains(NOTICE), "{said:?}");
}

fn a_choice_that_moved_since_it_was_listed_is_a_failure() {
    let arm = first_arm();
    let place = Place::with_python();
    let list = place.phase1(&["--list", "--format", "terse"]);
    list.under_nextest("r").said().succeeds(&[arm]);
    let said = place
        .phase1(&["--exact", arm, "--ignored"])
        .var("PHASE1_PROFILE", "cpu")
        .under_nextest("r")
        .said();
    assert_eq!(said.code, Some(101), "{said:?}");
    let words = format!("Environment: gate drift: {arm} was listed with another profile");
    assert!(said.out.contains(&words), "{said:?}");
    assert!(said.out.contains("expected sim (decided "), "{said:?}");

    // And the other way round: the product was there when the tests were listed.
    let list = place.phase1(&["--list", "--format", "terse"]);
    let list = list.var("PHASE1_PROFILE", "cpu").under_nextest("s").said();
    list.succeeds(&[arm]);
    let said = place.phase1(&["--exact", arm]).under_nextest("s").said();
    assert_eq!(said.code, Some(101), "{said:?}");
    assert!(said.out.contains("expected cpu (decided "), "{said:?}");
    assert!(said.out.contains(NOTICE), "{said:?}");
}

fn a_run_says_that_it_is_simulated_wherever_it_says_anything() {
    let place = Place::bare();
    let arm = first_arm();
    let file = place.file("file", "");
    let run = place
        .command(&["run", arm, "--profile", "sim"])
        .var("PHASE1_STATE_DIR", &file)
        .said();
    let failed = format!("[sim] {arm}: Environment: ");
    run.fails(101, &[&failed, &format!("stack:    {NOTICE}")]);
    assert!(run.err.starts_with(NOTICE), "{run:?}");
    assert!(run.out.contains(&format!("[sim] {arm}")), "{run:?}");
    assert_eq!(run.out.trim_end().lines().last(), Some(NOTICE), "{run:?}");
    let latest = place.path("runs/latest");
    let document = read_json(&latest.join("run.json"));
    assert_eq!(document["engine"], "sim");
    let result = read_json(&latest.join(arm.replace("::", "__")).join("result.json"));
    assert_eq!(result["engine"], "sim");
    assert_eq!(result["profile_name"], "sim");
    let again = result["again"].as_str().expect("a text");
    assert!(again.contains(" --profile=sim "), "{again}");
}

fn a_run_still_means_the_product() {
    let run = Place::bare().says(&["run", first_arm()]);
    run.fails(101, &["no suitable Python interpreter"]);
    assert!(!run.err.contains("simulated"), "{run:?}");
    assert!(!run.out.contains("sim"), "{run:?}");
}

fn its_plan_and_its_doctor_say_what_it_is() {
    let place = Place::bare();
    let render = place.says(&["render", "--profile", "sim"]);
    render.succeeds(&[
        &format!("# {NOTICE}"),
        "/kvcr-phase1 __sim dynamo.frontend",
        "KVCR_SIM=",
    ]);
    let doctor = place.says(&["doctor", "--profile", "sim"]);
    doctor.succeeds(&["The `sim` profile can run here.", "simulated stack"]);
    let report = place.says(&["doctor", "--json", "--profile", "sim"]).json();
    let rows = report["rows"].as_array().expect("rows");
    let row = |name: &str| rows.iter().find(|row| row["name"] == name);
    assert_eq!(row("stack").expect("a row")["found"], NOTICE);
    assert!(row("memory").is_none() && row("kvcr").is_none());
    // The model that it wrote is listed, and can be removed.
    place.says(&["env", "list"]).succeeds(&["model", "sim"]);
    place
        .says(&["env", "remove", "sim"])
        .succeeds(&["removed sim-"]);
}

fn nothing_can_be_installed_for_it() {
    let place = Place::bare();
    place.says(&["env", "install", "--profile", "sim"]).fails(
        1,
        &[
            "nothing is to be installed",
            "`kvcr-phase1 env install --profile cpu`",
        ],
    );
    place
        .says(&["render", "--profile", "sim", "--python", "/x"])
        .fails(2, &["--python: environment.python: the simulated stack is"]);
    place.says(&["render", "--sim-seed", "3"]).fails(
        2,
        &["--sim-seed: sim.seed: only the simulated stack has it"],
    );
}

fn the_lies_are_listed_and_a_wrong_one_names_the_nearest() {
    let place = Place::bare();
    let table = place.says(&["sim", "faults"]);
    table.succeeds(&["FAULT", "WHO", "WHAT", "SOURCE", NOTICE]);
    for entry in CATALOGUE {
        assert!(table.out.contains(entry.name), "{}", entry.name);
    }
    let nearest = "the nearest is corrupt_block";
    place
        .says(&["sim", "tell", "corupt_block"])
        .fails(2, &[nearest]);
    let flags = ["render", "--profile", "sim", "--sim-faults"];
    place
        .says(&[flags.as_slice(), &["corupt_block"]].concat())
        .fails(2, &[nearest]);
    place
        .says(&[flags.as_slice(), &["corrupt_block@worker9"]].concat())
        .fails(101, &["corrupt_block@worker9 would be told by nobody"]);
}

fn where_no_stack_runs_nothing_is_told() {
    let place = Place::bare();
    for args in [
        ["sim", "tell", "corrupt_block"].as_slice(),
        &["sim", "honest"],
    ] {
        place.says(args).fails(
            1,
            &[
                "Environment: no simulated stack runs",
                "`kvcr-phase1 up --profile sim --detach`",
            ],
        );
    }
}

fn a_process_is_not_simulated_by_a_wrong_name() {
    let said = Place::bare().says(&["__sim", "dynamo.nothing"]);
    said.fails(2, &["dynamo.nothing is not simulated"]);
}
