//! From what a profile asks for to what there is.

use std::path::Path;

use crate::config::Profile;
use crate::failure::Failure;

use super::progress::{Reporter, Silent};
use super::simulated::simulated;
use super::{Installed, ModelRequest, Request, Search, external, install, locate};

/// Makes ready what `profile` asks for, installing what is missing.
pub fn ensure(
    profile: &Profile,
    cache: &Path,
    reporter: &mut dyn Reporter,
) -> Result<Installed, Failure> {
    match asked(profile, cache)? {
        Asked::Locked(request) => Ok(as_asked(profile, install(&request, reporter)?)),
        Asked::External(python) => of_user(profile, python, cache, reporter),
        Asked::Simulated => simulated(profile, cache, reporter),
    }
}

/// Finds what `profile` asks for. Installs no packages; with an interpreter of the user's, and
/// for the simulated stack, a tiny model is made at need.
pub fn find(profile: &Profile, cache: &Path) -> Result<Installed, Failure> {
    match asked(profile, cache)? {
        Asked::Locked(request) => Ok(as_asked(profile, locate(&request)?)),
        Asked::External(python) => of_user(profile, python, cache, &mut Silent),
        Asked::Simulated => simulated(profile, cache, &mut Silent),
    }
}

enum Asked<'a> {
    Locked(Request),
    External(&'a Path),
    Simulated,
}

fn asked<'a>(profile: &'a Profile, cache: &Path) -> Result<Asked<'a>, Failure> {
    if profile.engine.kind.is_simulated() {
        return Ok(Asked::Simulated);
    }
    let environment = &profile.environment;
    match (&environment.lock, &environment.python) {
        (Some(name), _) => Ok(Asked::Locked(Request {
            name: name.clone(),
            cache: cache.to_owned(),
            model: model(profile)?,
            search: Search::default(),
        })),
        (None, Some(python)) => Ok(Asked::External(python)),
        (None, None) => Err(Failure::environment("the profile names no environment")
            .expected("environment.lock or environment.python")
            .hint("add `lock = \"cpu\"` below [environment]")),
    }
}

/// A locked environment always has its overlay on disk; the profile says whether it is used.
fn as_asked(profile: &Profile, mut installed: Installed) -> Installed {
    if !profile.environment.overlay {
        installed.overlay = None;
    }
    installed
}

fn of_user(
    profile: &Profile,
    python: &Path,
    cache: &Path,
    reporter: &mut dyn Reporter,
) -> Result<Installed, Failure> {
    let overlay = profile.environment.overlay;
    let search = Search::default();
    external(python, overlay, &model(profile)?, cache, &search, reporter)
}

/// The model that `profile` names.
pub(super) fn model(profile: &Profile) -> Result<ModelRequest, Failure> {
    match (&profile.model.build, &profile.model.path) {
        (Some(kind), _) => Ok(ModelRequest::Build {
            kind: kind.clone(),
            dtype: profile.engine.dtype.clone(),
        }),
        (None, Some(path)) => Ok(ModelRequest::Path(path.clone())),
        (None, None) => Err(Failure::environment("the profile names no model")
            .expected("model.build or model.path")
            .hint("add `build = \"dense\"` below [model]")),
    }
}
