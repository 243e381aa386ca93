//! Says when the files under `env/`, which are embedded in the binary, have changed.

fn main() {
    println!("cargo::rerun-if-changed=env");
    println!("cargo::rerun-if-changed=build.rs");
}
