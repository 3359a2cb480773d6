//! Compiles and embeds `hip/*.hip`.

fn main() {
    hk_build::compile_kernels("hip");
}
