//! An interpreter that the user names, with the packages it has.

use std::path::Path;

use crate::failure::Failure;

use super::assets::{self, Recipe};
use super::install::absolute;
use super::model::{self, ModelRequest};
use super::progress::Reporter;
use super::{Installed, Program, child::Search, dynamo, etcd, interpreter, log, packages};

/// The recipe whose overlay and scripts are used with it.
const RECIPE: &str = "cpu";

/// Describes `python` as it is. Nothing is installed into it; the overlay (if wanted) and a
/// model to build go to the cache.
pub fn external(
    python: &Path,
    overlay: bool,
    request: &ModelRequest,
    cache: &Path,
    search: &Search,
    reporter: &mut dyn Reporter,
) -> Result<Installed, Failure> {
    let recipe = Recipe::embedded(RECIPE)?;
    let (python, cache) = (absolute(python)?, &absolute(cache)?);
    let found = interpreter::ask(&python).map_err(|why| {
        Failure::environment(format!("{} is no usable interpreter", python.display()))
            .expected("a Python with vLLM, Dynamo, KVCR and NIXL")
            .found(why)
            .hint("correct environment.python in the profile")
    })?;
    let overlay = match overlay && recipe.has_overlay() {
        true => {
            log::create_dir(cache)?;
            let files = recipe
                .on_disk(cache)
                .map_err(|error| log::io("cannot write the overlay", cache, &error))?;
            Some(files.join(assets::OVERLAY))
        }
        false => None,
    };
    let packages = packages::scan(&found.site);
    let model = model::install(request, &recipe, cache, &python, reporter)?;
    let etcd = etcd::find(None, search);
    let overlaid = overlay.as_ref().map(|_| recipe.digest());
    let key = assets::hash([
        packages::digest(&packages).as_bytes(),
        found.to_string().as_bytes(),
        overlaid.unwrap_or_default().as_bytes(),
    ]);
    Ok(Installed {
        key,
        program: Program::Python(python),
        overlay,
        model: model.directory,
        model_digest: model.digest,
        etcd: etcd.and_then(|choice| choice.program),
        packages,
        reads_nested_tiers: dynamo::reads_nested_tiers(&found.site),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::fakes;
    use crate::environment::progress::Silent;

    #[test]
    fn is_taken_as_it_is_and_keyed_by_its_packages() {
        let place = tempfile::tempdir().unwrap();
        let model = place.path().join("model");
        std::fs::create_dir(&model).unwrap();
        std::fs::write(model.join("config.json"), "{}").unwrap();
        let site = place.path().join("site");
        std::fs::create_dir_all(site.join("kvcr-0.1.1.dist-info")).unwrap();
        let python = place.path().join("python");
        fakes::script(
            &python,
            &format!(
                r#"echo '{{"implementation": "CPython", "version": [3, 13, 0], "executable": "/x", "site": ["{}"]}}'"#,
                site.display()
            ),
        );
        let describe = || {
            let request = ModelRequest::Path(model.clone());
            let search = fakes::search(place.path(), place.path());
            external(&python, false, &request, place.path(), &search, &mut Silent).unwrap()
        };
        let first = describe();
        assert_eq!(first.program, Program::Python(python.clone()));
        assert_eq!(first.overlay, None);
        assert_eq!(first.packages["kvcr"].version, "0.1.1");
        assert_eq!(describe().key, first.key);
        std::fs::create_dir_all(site.join("nixl-1.5.0.dist-info")).unwrap();
        assert_ne!(describe().key, first.key);
    }

    #[test]
    fn something_else_than_python_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let python = place.path().join("python");
        fakes::script(&python, "exit 7");
        let request = ModelRequest::Path(place.path().to_owned());
        let search = Search::default();
        let failure = external(&python, true, &request, place.path(), &search, &mut Silent);
        assert!(failure.unwrap_err().to_string().contains("exit status 7"));
    }
}
