//! Build-script helper: compiles HIP kernels for every target and embeds the code objects.
//!
//! The `main` of a family crate's `build.rs` is one call:
//!
//! ```no_run
//! hk_build::compile_kernels("hip");
//! ```
//!
//! It compiles every `hip/*.hip` for every target of `HK_TARGETS` (default `gfx942,gfx950`; `sm_90` and `sm_90a` give PTX), in
//! parallel, keeps the results in `<target dir>/hk-cache` under the hash of everything they depend on, checks what each
//! kernel needs ([`Resources`]), and writes `$OUT_DIR/kernels.rs` with one `hk_core::CodeObjects` per file, and the parameter
//! structs of its kernels with references to the entry points ([`Interface`]).
//!
//! | variable     | meaning                                                                          |
//! |--------------|----------------------------------------------------------------------------------|
//! | `HK_CLANG`   | the compiler, clang >= 20 or hipcc; no other is tried                            |
//! | `ROCM_PATH`  | where ROCm is, default `/opt/rocm`; its compiler is tried first                  |
//! | `HK_EMBED`   | 0: the program reads its code objects from the folder that `HK_KERNELS` names   |
//! | `HK_TARGETS` | comma-separated targets: `gfx942`, `gfx950`, `sm_90`, `sm_90a`                   |
//! | `NUM_JOBS`   | compilers to run at the same time, set by cargo                                  |
//!
//! Without a compiler the crate still builds, as documentation hosts need: the parameter structs come from the committed
//! [`INTERFACE_FILE`], the code objects are `missing`, and the first launch says why and what to install. The build script of such a crate runs again with every build, so that the
//! kernels are there as soon as a compiler is.
//!
//! A kernel that spills registers, uses scratch memory or asks for more LDS than the part has fails the build and is
//! named.

mod compile;
mod compiler;
mod embed;
mod error;
mod interface;
mod manifest;
mod source;

pub use compile::{Builder, Built, Description, Header, cache_dir, compile_flags};
pub use compiler::{
    Candidate, Compiler, CompilerKind, INSTALL, MIN_VERSION, Search, SearchError, Verdict, Version,
};
pub use embed::{Embed, Embedded, compile_kernels};
pub use error::Error;
pub use hk_codeobj::Arch;
pub use interface::{Field, INTERFACE_FILE, Interface, Struct};
pub use manifest::{KernelEntry, ObjectEntry, Resources};
pub use source::{Unit, package_includes, package_units, parse_targets};

/// The targets that are compiled for unless `HK_TARGETS` says otherwise.
pub const DEFAULT_TARGETS: [Arch; 2] = Arch::AMD;
