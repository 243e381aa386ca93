//! Stand-ins for programs, for tests: shell scripts that answer as the real ones do.

use std::path::Path;

use super::child::Search;

/// An executable shell script.
pub(crate) fn script(path: &Path, body: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    // A shell writes it: were it open for writing in this process, a child that another test
    // thread forks at that moment would make it unexecutable (ETXTBSY).
    let status = std::process::Command::new("/bin/sh")
        .args(["-c", "printf '%s' \"$1\" > \"$0\" && chmod 755 \"$0\""])
        .arg(path)
        .arg(format!("#!/bin/sh\n{body}\n"))
        .status()
        .unwrap();
    assert!(status.success());
}

/// An interpreter that knows only what it is.
pub(crate) fn python(path: &Path, implementation: &str, version: (u32, u32, u32)) {
    let (major, minor, patch) = version;
    let at = path.display();
    script(
        path,
        &format!(
            r#"echo '{{"implementation": "{implementation}", "version": [{major}, {minor}, {patch}], "executable": "{at}", "site": []}}'"#
        ),
    );
}

/// A search that sees `bin` and the shell's own tools.
pub(crate) fn search(bin: &Path, home: &Path) -> Search {
    Search {
        path: Some(bin.as_os_str().to_owned()),
        home: Some(home.to_owned()),
    }
}
