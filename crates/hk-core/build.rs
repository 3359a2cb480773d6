//! Tells the build scripts of dependent crates where the device headers are (`DEP_HK_CORE_INCLUDE`).

fn main() {
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    println!("cargo::metadata=include={root}/hip/include");
    // By its absolute path, so that this runs again in a checkout that has been moved.
    println!("cargo::rerun-if-changed={root}/build.rs");
}
