//! Compiles and embeds `hip/*.hip`, and tells the build scripts of dependent crates where the device headers are
//! (`DEP_HK_ACTIVATION_INCLUDE`).

fn main() {
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    println!("cargo::metadata=include={root}/hip/include");
    hk_build::compile_kernels("hip");
}
