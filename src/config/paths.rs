//! Where things are: state, cache, evidence, package root.

use std::path::{Path, PathBuf};

use super::Paths;
use super::env::EnvSource;

const NAME: &str = "kvcr-phase1";

/// The defaults for this user, machine and current directory.
pub(super) fn defaults(env: &dyn EnvSource) -> Paths {
    let root = root(env);
    Paths {
        state: match directory(env, "XDG_RUNTIME_DIR") {
            Some(runtime) => runtime.join(NAME),
            None => PathBuf::from(format!("/tmp/{NAME}-{}", env.uid())),
        },
        cache: match (
            directory(env, "XDG_CACHE_HOME"),
            env.home().filter(|home| home.is_absolute()),
        ) {
            (Some(cache), _) => cache.join(NAME),
            (None, Some(home)) => home.join(".cache").join(NAME),
            (None, None) => PathBuf::from(format!("/tmp/{NAME}-{}/cache", env.uid())),
        },
        runs: runs(env, &root),
        root,
    }
}

/// cargo and nextest say where the package is; a bare binary looks around itself; a binary far
/// from any checkout falls back to where it was built.
fn root(env: &dyn EnvSource) -> PathBuf {
    if let Some(manifest) = directory(env, "CARGO_MANIFEST_DIR") {
        return manifest;
    }
    let here = env.current_dir();
    here.ancestors()
        .find(|dir| is_root(dir))
        .unwrap_or(Path::new(env!("CARGO_MANIFEST_DIR")))
        .to_path_buf()
}

fn is_root(dir: &Path) -> bool {
    dir.join("Cargo.toml").is_file() && dir.join("snapshots").is_dir()
}

fn runs(env: &dyn EnvSource, root: &Path) -> PathBuf {
    // Cargo resolves a relative target directory against where it was called, which is the
    // package root in every way that we are started.
    if let Some(target) = env.var("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty()) {
        return root.join(target).join("phase1");
    }
    if root.join("Cargo.toml").is_file() {
        root.join("target").join("phase1")
    } else {
        env.current_dir().join("phase1-runs")
    }
}

/// The XDG rule: a relative path is as good as none.
fn directory(env: &dyn EnvSource, name: &str) -> Option<PathBuf> {
    env.var(name)
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::super::testing::FakeEnv;
    use super::*;

    #[test]
    fn xdg_directories_win() {
        let env = FakeEnv::new([
            ("XDG_RUNTIME_DIR", "/run/user/7"),
            ("XDG_CACHE_HOME", "/c"),
            ("HOME", "/h"),
        ]);
        let paths = defaults(&env);
        assert_eq!(paths.state, Path::new("/run/user/7/kvcr-phase1"));
        assert_eq!(paths.cache, Path::new("/c/kvcr-phase1"));
    }

    #[test]
    fn without_them_the_user_is_in_the_name() {
        let paths = defaults(&FakeEnv::new([("HOME", "/h"), ("XDG_CACHE_HOME", "rel")]));
        assert_eq!(paths.state, Path::new("/tmp/kvcr-phase1-7"));
        assert_eq!(paths.cache, Path::new("/h/.cache/kvcr-phase1"));
    }

    #[test]
    fn evidence_goes_where_cargo_builds() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_str().unwrap();
        let none = defaults(&FakeEnv::new([("CARGO_MANIFEST_DIR", root)]).cwd("/w"));
        assert_eq!(none.runs, Path::new("/w/phase1-runs"));
        std::fs::write(dir.path().join("Cargo.toml"), "").unwrap();
        let inside = defaults(&FakeEnv::new([("CARGO_MANIFEST_DIR", root)]));
        assert_eq!(inside.runs, dir.path().join("target/phase1"));
        let moved = FakeEnv::new([("CARGO_MANIFEST_DIR", root), ("CARGO_TARGET_DIR", "/t")]);
        assert_eq!(defaults(&moved).runs, Path::new("/t/phase1"));
    }

    #[test]
    fn the_nearest_package_above_is_the_root() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("Cargo.toml"), "").unwrap();
        std::fs::create_dir_all(dir.path().join("snapshots")).unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        let env = FakeEnv::new([]).cwd(dir.path().join("a/b"));
        assert_eq!(defaults(&env).root, dir.path());
    }
}
