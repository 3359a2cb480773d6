//! Compiles the kernels of these tests.

use bytemuck::{Pod, Zeroable};
use hk_core::{Arch, CodeObjects, GlobalLayout};
use std::path::{Path, PathBuf};

/// The parameters of the kernels in `tests/hip/probe.hip`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub struct Params {
    pub x: GlobalLayout,
    pub y: GlobalLayout,
    pub a: f32,
    pub pad: u32,
}

/// `tests/hip/{name}.hip` for both AMD targets.
pub fn compile(name: &'static str) -> &'static CodeObjects {
    let images: Vec<(Arch, &'static [u8])> = Arch::AMD.into_iter().map(|a| (a, image(name, a))).collect();
    leak(CodeObjects::embedded(name, images.leak()))
}

/// `tests/hip/{name}.hip` for one target.
pub fn image(name: &str, arch: Arch) -> &'static [u8] {
    let compiler = hk_build::Search::from_env().find().expect("these tests need the compiler");
    let builder = hk_build::Builder::new(compiler, Path::new(env!("CARGO_TARGET_TMPDIR")).join("hk-cache"));
    let unit = hk_build::Unit {
        package: "hk-core".into(),
        root: env!("CARGO_MANIFEST_DIR").into(),
        source: PathBuf::from("tests/hip").join(name).with_extension("hip"),
        includes: vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("hip/include")],
        arch,
    };
    builder.compile(&unit).unwrap_or_else(|e| panic!("{e}")).bytes.leak()
}

pub fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}
