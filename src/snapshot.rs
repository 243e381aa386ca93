//! The only user of insta.

/// Compares `text` with `snapshots/<name>.snap`.
#[cfg(test)]
pub(crate) fn golden(name: &str, text: &str) {
    let (folder, stem) = name.rsplit_once('/').unwrap_or(("", name));
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(
        std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("snapshots")
            .join(folder),
    );
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(stem, text));
}
