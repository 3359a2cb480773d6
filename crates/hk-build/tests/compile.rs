//! Compiling, caching and embedding, with the compiler of this machine.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use hk_build::{Arch, Builder, Compiler, Embed, Error, Interface, ObjectEntry, Search, package_units};
use tempfile::TempDir;

const GOOD: &str = r#"
#include <lib/scale.h>
#include "beside.h"
struct Params { const float *x; float *y; float scale; };
extern "C" __attribute__((global)) __launch_bounds__(256) void good(Params p) {
  p.y[hk_x()] = scale(p.x[hk_x()], p.scale);
}
"#;
/// Works on all targets: no header of ROCm or CUDA is there to declare these.
const SCALE: &str = r#"
#pragma once
#if defined(__AMDGCN__)
#define __launch_bounds__(n) __attribute__((amdgpu_flat_work_group_size(1, n)))
#else
#define __launch_bounds__(n) __attribute__((launch_bounds(n)))
#endif
__attribute__((device)) inline float scale(float x, float s) { return x * s; }
"#;
const BESIDE: &str = r#"
#pragma once
#if defined(__AMDGCN__)
__attribute__((device)) inline int hk_x() { return __builtin_amdgcn_workitem_id_x(); }
#else
__attribute__((device)) inline int hk_x() { return __nvvm_read_ptx_sreg_tid_x(); }
#endif
"#;
const LDS_68K: &str = r#"
extern "C" __attribute__((global)) void big_tile(float *y, int i) {
  static __attribute__((shared)) float tile[17408];
  tile[__builtin_amdgcn_workitem_id_x()] = y[i];
  __builtin_amdgcn_s_barrier();
  y[0] = tile[i];
}
"#;
const SCRATCH: &str = r#"
extern "C" __attribute__((global)) void uses_stack(float *y, int n) {
  volatile float local[64];
  for (int i = 0; i < 64; i++) local[i] = y[i];
  y[0] = local[n];
}
"#;
const SPILL: &str = r#"
using Acc = float __attribute__((ext_vector_type(16)));
using Bf16x4 = short __attribute__((ext_vector_type(4)));
extern "C" __attribute__((global, amdgpu_flat_work_group_size(1024, 1024))) void spills(const Bf16x4 *a, Acc *c) {
  const int t = __builtin_amdgcn_workitem_id_x();
  Acc acc[16];
  for (int i = 0; i < 16; i++) acc[i] = c[t * 16 + i];
  for (int k = 0; k < 100; k++) {
#pragma unroll
    for (int i = 0; i < 16; i++) acc[i] = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a[k], a[k], acc[i], 0, 0, 0);
  }
  for (int i = 0; i < 16; i++) c[t * 16 + i] = acc[i];
}
"#;

/// A package with sources, in a directory of its own.
struct Package {
    dir: TempDir,
}

impl Package {
    fn new(sources: &[(&str, &str)]) -> Package {
        let package = Package { dir: tempfile::tempdir().unwrap() };
        package.write("pkg/Cargo.toml", "");
        package.write("core/Cargo.toml", "");
        package.write("core/hip/include/lib/scale.h", SCALE);
        package.write("pkg/hip/beside.h", BESIDE);
        for (name, text) in sources {
            package.write(&format!("pkg/hip/{name}"), text);
        }
        fs::create_dir(package.path("out")).unwrap();
        package
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn embed(&self, targets: &[Arch]) -> Embed {
        Embed {
            package: "pkg".into(),
            root: self.path("pkg"),
            dir: "hip".into(),
            out_dir: self.path("out"),
            cache: self.path("cache"),
            includes: vec![self.path("core/hip/include")],
            targets: targets.into(),
            embed: true,
            search: Search::from_env(),
            threads: 2,
        }
    }

    /// A compiler that counts its runs and otherwise is the machine's.
    fn counting_compiler(&self, version_prefix: &str) -> PathBuf {
        let real = compiler().path;
        let path = self.path("counting-clang");
        let (log, real) = (self.path("runs"), real.display().to_string());
        let script = format!(
            "#!/bin/sh\nfor a; do case \"$a\" in\n--version) printf '{version_prefix}'; exec {real} --version;;\n\
             -print-prog-name=*) exec {real} \"$a\";;\nesac; done\n\
             kind=object; for a; do case \"$a\" in -fsyntax-only) kind=description;; esac; done\n\
             echo $kind >> {}\nexec {real} \"$@\"\n",
            log.display()
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Objects that it has made, and descriptions.
    fn runs(&self) -> [usize; 2] {
        let log = fs::read_to_string(self.path("runs")).unwrap_or_default();
        ["object", "description"].map(|kind| log.lines().filter(|line| *line == kind).count())
    }
}

/// Tests without a compiler would prove nothing: they fail, with the remedy.
fn compiler() -> Compiler {
    Search::from_env().find().unwrap_or_else(|e| panic!("{e}"))
}

fn error_of(source: &str, arch: Arch) -> Error {
    let package = Package::new(&[("bad.hip", source)]);
    package.embed(&[arch]).run().unwrap_err()
}

#[test]
fn objects_are_embedded_for_every_target() {
    let package = Package::new(&[("good.hip", GOOD)]);
    let embedded = package.embed(&Arch::ALL).run().unwrap();
    assert_eq!(embedded.objects.len(), Arch::ALL.len());
    for object in &embedded.objects {
        assert_eq!(object.warnings, "");
        assert_eq!(object.kernels.len(), 1);
        assert_eq!(object.kernels[0].name, "good");
        assert_eq!(object.kernels[0].resources.is_some(), object.unit.arch.is_amd());
        assert_eq!(fs::read(package.path("out").join(object.unit.object_name())).unwrap(), object.bytes);
    }
    let ptx = fs::read_to_string(package.path("out/good.sm_90.ptx")).unwrap();
    assert!(ptx.contains(".target sm_90") && ptx.contains(".visible .entry good("), "{ptx}");

    let manifest: Vec<ObjectEntry> =
        serde_json::from_slice(&fs::read(package.path("out/kernels.json")).unwrap()).unwrap();
    assert_eq!(manifest, embedded.objects.iter().map(|o| o.entry()).collect::<Vec<_>>());
    let resources = manifest[0].kernels[0].resources.as_ref().unwrap();
    assert_eq!((resources.max_threads, resources.arg_bytes, resources.occupancy), (256, 24, 8));

    for directive in ["rerun-if-env-changed=HK_CLANG", "rerun-if-env-changed=HK_TARGETS"] {
        assert!(embedded.directives.iter().any(|d| d == directive));
    }
    for watched in ["pkg/hip", "pkg/hip/beside.h", "core/hip/include/lib/scale.h"] {
        let directive = format!("rerun-if-changed={}", package.path(watched).display());
        assert!(embedded.directives.contains(&directive), "{directive}");
    }
    compiles_as_rust(&package, "kernels::GOOD.1.len() == 4");
}

/// Compiles and runs `kernels.rs` against stand-ins of hk-core and bytemuck.
fn compiles_as_rust(package: &Package, condition: &str) {
    let status = rustc(package, condition);
    assert!(status.0, "{}", status.1);
    assert!(Command::new(package.path("main")).status().unwrap().success());
}

/// Whether it compiles, and what the compiler says.
fn rustc(package: &Package, condition: &str) -> (bool, String) {
    package.write("bytemuck.rs", "pub unsafe trait Zeroable {} pub unsafe trait Pod {}");
    package.write(
        "hk_core.rs",
        r#"
#[derive(Debug, PartialEq)]
pub enum Arch { Gfx942, Gfx950, Sm90, Sm90a }
pub struct CodeObjects(pub &'static str, pub &'static [(Arch, &'static [u8])], pub &'static str);
impl CodeObjects {
    pub const fn embedded(n: &'static str, o: &'static [(Arch, &'static [u8])]) -> Self { Self(n, o, "") }
    pub const fn missing(n: &'static str, why: &'static str) -> Self { Self(n, &[], why) }
}
pub struct KernelRef<P>(pub &'static CodeObjects, pub &'static str, std::marker::PhantomData<P>);
impl<P> KernelRef<P> {
    pub const fn find(sources: &[(&'static CodeObjects, &[&str])], name: &'static str) -> Self {
        let mut i = 0;
        while i < sources.len() {
            let mut j = 0;
            while j < sources[i].1.len() {
                if sources[i].1[j].len() == name.len() { return Self(sources[i].0, name, std::marker::PhantomData); }
                j += 1;
            }
            i += 1;
        }
        panic!("no such entry point")
    }
}
"#,
    );
    package.write(
        "main.rs",
        &format!(
            "mod kernels {{ include!(concat!(env!(\"OUT_DIR\"), \"/kernels.rs\")); }}\nfn main() {{ assert!({condition}) }}"
        ),
    );
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let mut text = String::new();
    for (source, kind) in [("bytemuck.rs", "lib"), ("hk_core.rs", "lib"), ("main.rs", "bin")] {
        let mut command = Command::new(&rustc);
        command
            .current_dir(package.path(""))
            .args(["--edition=2024", "-Awarnings", "--crate-type", kind])
            .arg(source);
        if kind == "bin" {
            command.args(["-L", ".", "--extern", "hk_core", "--extern", "bytemuck"]);
        }
        let output = command.env("OUT_DIR", package.path("out")).output().unwrap();
        text += &String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            return (false, text);
        }
    }
    (true, text)
}

/// What `HK_ENTRY` of `hk/entry.h` is to the compiler, in short.
const TYPED: &str = r#"
#if defined(HK_DESCRIBE)
#define HK_ENTRY(name, body) struct hk_entry_##name { Params params; }; static_assert(sizeof(hk_entry_##name) > 0);
#else
#define HK_ENTRY(name, body) extern "C" __attribute__((global)) void name(Params p) { body }
#endif
namespace lib { struct Scalars { float scale; unsigned n; }; }
namespace { struct Params { const float *x; float *y; lib::Scalars scalars[2]; }; }
HK_ENTRY(typed_a, p.y[0] = p.x[0] * p.scalars[0].scale;)
HK_ENTRY(typed_two, p.y[0] = p.x[1] * p.scalars[1].scale;)
"#;

#[test]
fn entry_points_and_parameters_are_typed() {
    let package = Package::new(&[("typed.hip", TYPED)]);
    package.embed(&Arch::ALL).run().unwrap();
    let params =
        "kernels::typed::Params { x: 1, y: 2, scalars: [kernels::lib::Scalars { scale: 0.5, n: 3 }; 2] }";
    let kernel = "const { kernels::typed::Params::kernel(\"typed_two\") }";
    let condition =
        format!("{kernel}.1 == \"typed_two\" && {kernel}.0.0 == \"typed\" && {params}.scalars[1].n == 3");
    compiles_as_rust(&package, &condition);
    // A wrong name or field is an error of the Rust compiler.
    let wrong = rustc(&package, &condition.replace("typed_two", "typed_three"));
    assert!(!wrong.0 && wrong.1.contains("no such entry point"), "{}", wrong.1);
    let wrong = rustc(&package, &condition.replace("scale:", "factor:"));
    assert!(!wrong.0 && wrong.1.contains("factor"), "{}", wrong.1);

    // Without a compiler the committed interface stands in.
    let interface = interface(&package, &Arch::ALL).unwrap();
    interface.write(&package.path("pkg/hip")).unwrap();
    assert_eq!(Interface::read(&package.path("pkg/hip")).unwrap(), interface);
    let mut embed = package.embed(&Arch::AMD);
    embed.search = Search::default();
    assert!(embed.run().unwrap().objects.is_empty());
    compiles_as_rust(&package, &condition);
}

/// From descriptions, without an object.
fn interface(package: &Package, targets: &[Arch]) -> Result<Interface, Error> {
    let includes = [package.path("core/hip/include")];
    let units = package_units("pkg", &package.path("pkg"), "hip", &includes, targets)?;
    Builder::new(compiler(), package.path("cache")).interface(&units)
}

#[test]
fn an_interface_is_described_without_objects() {
    let package = Package::new(&[("typed.hip", TYPED)]);
    let typed = interface(&package, &Arch::AMD).unwrap();
    assert_eq!(typed.entries["typed"].keys().collect::<Vec<_>>(), ["typed_a", "typed_two"]);
    let names = fs::read_dir(package.path("cache")).unwrap().map(|e| e.unwrap().path());
    assert!(names.into_iter().all(|path| path.extension().is_some_and(|e| e == "json")));

    // What differs is named: fields in another order, an entry point of another name.
    package
        .write("pkg/hip/typed.hip", &TYPED.replace("float scale; unsigned n;", "unsigned n; float scale;"));
    assert_eq!(interface(&package, &Arch::AMD).unwrap().differences(&typed), ["lib::Scalars"]);
    package.write("pkg/hip/typed.hip", &TYPED.replace("typed_two", "typed_b"));
    assert_eq!(interface(&package, &Arch::AMD).unwrap().differences(&typed), ["typed_b", "typed_two"]);
    assert!(typed.differences(&typed).is_empty());

    let one_target = TYPED.replace("HK_ENTRY(typed_two", "#if defined(__gfx942__)\nHK_ENTRY(typed_two");
    package.write("pkg/hip/typed.hip", &(one_target + "#endif\n"));
    let error = interface(&package, &Arch::AMD).unwrap_err().to_string();
    assert_eq!(error, "pkg/hip/typed.hip: entry points or their parameters differ between gfx942 and gfx950");
}

#[test]
fn padding_in_parameters_is_refused() {
    let source = TYPED.replace("unsigned n;", "unsigned char n;");
    let error = error_of(&source, Arch::Gfx942).to_string();
    assert_eq!(error, "pkg/hip/bad.hip for gfx942: lib::Scalars: padding at its end: add a field of 3 bytes");
}

#[test]
fn without_embedding_nothing_is_compiled() {
    let package = Package::new(&[("broken.hip", "?"), ("two-words.hip", GOOD)]);
    let mut embed = package.embed(&Arch::AMD);
    embed.embed = false;
    let embedded = embed.run().unwrap();
    assert!(embedded.objects.is_empty() && !package.path("cache").exists());
    assert!(embedded.directives.contains(&"rerun-if-env-changed=HK_EMBED".into()));
    assert!(embedded.directives.iter().all(|d| !d.starts_with("warning=")));
    let source = fs::read_to_string(package.path("out/kernels.rs")).unwrap();
    let lines = ["external(\"PACKAGE\", \"broken\")", "external(\"PACKAGE\", \"two-words\")"];
    for line in lines.map(|line| line.replace("PACKAGE", &embed.package)) {
        assert!(source.contains(&line), "`{line}`: {source}");
    }
}

#[test]
fn without_a_compiler_the_crate_builds_and_says_what_to_do() {
    let package = Package::new(&[("good.hip", GOOD), ("two-words.hip", GOOD)]);
    let mut embed = package.embed(&Arch::AMD);
    embed.search = Search::default();
    let embedded = embed.run().unwrap();
    assert!(embedded.objects.is_empty());
    // The build script has to run again when a compiler appears.
    let always = embedded.directives.iter().filter_map(|d| d.strip_prefix("rerun-if-changed="));
    assert!(always.into_iter().any(|path| !Path::new(path).exists()));
    assert!(
        embedded
            .directives
            .iter()
            .any(|d| d.starts_with("warning=") && d.contains("apt-get install clang-22"))
    );
    assert_eq!(fs::read(package.path("out/kernels.json")).unwrap(), b"[]");
    compiles_as_rust(
        &package,
        r#"kernels::TWO_WORDS.0 == "two-words" && kernels::GOOD.1.is_empty() && kernels::GOOD.2.contains("apt-get")"#,
    );

    embed.search.hk_clang = Some("/nonexistent/clang++".into());
    assert!(matches!(embed.run(), Err(Error::Compiler(e)) if e.explicit));
}

#[test]
fn a_cache_hit_does_not_run_the_compiler() {
    let package = Package::new(&[("good.hip", GOOD)]);
    let mut embed = package.embed(&Arch::AMD);
    embed.search = Search { hk_clang: Some(package.counting_compiler("").into()), ..Search::default() };
    let run = || embed.run().unwrap().objects;

    let first = run();
    assert_eq!((package.runs(), first.iter().filter(|o| o.cached).count()), ([2, 2], 0));
    let second = run();
    assert_eq!((package.runs(), second.iter().filter(|o| o.cached).count()), ([2, 2], 2));
    assert_eq!(first[0].bytes, second[0].bytes);

    // Anything that the object depends on misses: source, header beside it, library header, compiler version.
    package.write("pkg/hip/good.hip", &GOOD.replace("* s", "* s "));
    package.write("pkg/hip/good.hip", &format!("{GOOD}\n"));
    run();
    assert_eq!(package.runs(), [4, 4]);
    package.write("pkg/hip/beside.h", &format!("{BESIDE}\n"));
    run();
    assert_eq!(package.runs(), [6, 6]);
    package.write("core/hip/include/lib/scale.h", &format!("{SCALE}\n"));
    run();
    assert_eq!(package.runs(), [8, 8]);
    // A header that it does not include is nothing to it, where it lies.
    package.write("core/hip/include/lib/new.h", "");
    package.write("pkg/hip/other.h", "");
    run();
    assert_eq!(package.runs(), [8, 8]);
    package.counting_compiler("another ");
    run();
    assert_eq!(package.runs(), [10, 10]);
    run();
    assert_eq!(package.runs(), [10, 10]);

    // A damaged entry is made again.
    for entry in fs::read_dir(package.path("cache")).unwrap() {
        fs::write(entry.unwrap().path(), "damaged").unwrap();
    }
    let again = run();
    assert_eq!(package.runs(), [12, 12]);
    assert!(again.iter().all(|o| !o.cached));
    run();
    assert_eq!(package.runs(), [12, 12]);
}

#[test]
fn two_checkouts_with_one_cache_have_headers_of_their_own() {
    let (a, b) = (Package::new(&[("good.hip", GOOD)]), Package::new(&[("good.hip", GOOD)]));
    b.write("core/hip/include/lib/scale.h", &SCALE.replace("return x * s;", "return x + s;"));
    let build = |package: &Package| {
        let embed = Embed { cache: a.path("cache"), ..package.embed(&[Arch::Gfx942]) };
        embed.run().unwrap().objects.remove(0)
    };
    assert_ne!(build(&a).bytes, build(&b).bytes);
    assert!(build(&a).cached && build(&b).cached);
}

#[test]
fn the_cache_keeps_the_newest_entries_only() {
    let package = Package::new(&[("good.hip", GOOD)]);
    let embed = package.embed(&[Arch::Gfx942]);
    for i in 0..20 {
        package.write("pkg/hip/good.hip", &format!("{GOOD}// {i}"));
        assert!(!embed.run().unwrap().objects[0].cached);
    }
    let entries = fs::read_dir(package.path("cache")).unwrap();
    let names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    for end in [".co", ".co.json"] {
        assert_eq!(names.iter().filter(|name| name.ends_with(end)).count(), 16, "{end}");
    }
    assert!(embed.run().unwrap().objects[0].cached);
}

#[test]
fn objects_hold_no_path_of_the_machine() {
    let (a, b) = (Package::new(&[("good.hip", GOOD)]), Package::new(&[("good.hip", GOOD)]));
    let build = |p: &Package| p.embed(&Arch::ALL).run().unwrap().objects;
    for (x, y) in build(&a).iter().zip(build(&b)) {
        assert!(!x.cached && !y.cached);
        assert!(x.bytes == y.bytes, "{} depends on where the package lies", x.unit.object_name());
        let text = String::from_utf8_lossy(&x.bytes).into_owned();
        let machine =
            [a.dir.path(), Path::new("/tmp"), Path::new("/usr"), Path::new(env!("CARGO_MANIFEST_DIR"))];
        for path in machine {
            assert!(
                !text.contains(&path.display().to_string()),
                "{} in {}",
                path.display(),
                x.unit.object_name()
            );
        }
        if x.unit.arch.is_amd() {
            assert!(
                text.contains("hip/good.hip") && text.contains("core/hip/include/lib"),
                "line tables name the sources"
            );
        }
    }
}

#[test]
fn too_much_static_lds_is_the_compilers_error() {
    let error = error_of(LDS_68K, Arch::Gfx942);
    let text = error.to_string();
    assert!(matches!(error, Error::Compile { arch: Arch::Gfx942, .. }));
    assert!(text.starts_with("pkg/hip/bad.hip for gfx942: the compiler failed\n"), "{text}");
    for word in ["69632", "65536", "big_tile"] {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
    let package = Package::new(&[("bad.hip", LDS_68K)]);
    let objects = package.embed(&[Arch::Gfx950]).run().unwrap().objects;
    assert_eq!(objects[0].kernels[0].resources.as_ref().unwrap().lds_bytes, 69632);
}

#[test]
fn scratch_and_spills_fail_with_the_kernels_name() {
    for arch in Arch::AMD {
        let text = error_of(SCRATCH, arch).to_string();
        assert!(text.contains(&format!("for {arch}: kernel `uses_stack` uses ")), "{text}");
        assert!(text.contains("bytes of scratch memory per lane"), "{text}");
        let text = error_of(SPILL, arch).to_string();
        assert!(text.contains("kernel `spills` uses ") && text.contains(" vector and "), "{text}");
    }
    // A failure is not forgotten by the cache.
    let package = Package::new(&[("bad.hip", SCRATCH)]);
    let embed = package.embed(&[Arch::Gfx942]);
    assert!(matches!(embed.run(), Err(Error::Resources { .. })));
    assert!(matches!(embed.run(), Err(Error::Resources { .. })));
}

#[test]
fn the_compilers_words_reach_the_user() {
    let text =
        error_of("extern \"C\" __attribute__((global)) void k() { undeclared(); }", Arch::Gfx942).to_string();
    assert!(text.contains("hip/bad.hip:1:") && text.contains("undeclared"), "{text}");
    // System headers are out of reach: they differ from machine to machine.
    let text = error_of("#include <stdio.h>", Arch::Gfx950).to_string();
    assert!(text.contains("stdio.h"), "{text}");

    let package =
        Package::new(&[("warns.hip", "static __attribute__((device)) int unused(int x) { return 1; }")]);
    let embed = package.embed(&[Arch::Gfx942]);
    for _ in 0..2 {
        let embedded = embed.run().unwrap();
        assert!(embedded.directives.iter().any(|d| d.starts_with("warning=") && d.contains("unused")));
    }
}

#[test]
fn hipcc_takes_the_same_flags() {
    let package = Package::new(&[("good.hip", GOOD)]);
    let mut embed = package.embed(&Arch::AMD);
    let hipcc = package.counting_compiler("HIP version: 7.1.0-fake\\n");
    embed.search = Search { hk_clang: Some(hipcc.clone().into()), ..Search::default() };
    let found = embed.search.find().unwrap();
    assert_eq!((found.kind, &found.path), (hk_build::CompilerKind::Hipcc, &hipcc));
    assert_eq!(embed.run().unwrap().objects.len(), 2);
    assert_eq!(package.runs(), [2, 2]);
}

#[test]
fn one_failure_does_not_stop_the_others() {
    let package = Package::new(&[("a.hip", SCRATCH), ("b.hip", GOOD), ("c.hip", "?"), ("d.hip", GOOD)]);
    let embed = package.embed(&[Arch::Gfx942]);
    let units = package_units("pkg", &embed.root, "hip", &embed.includes, &embed.targets).unwrap();
    let done = std::sync::Mutex::new(Vec::new());
    let builder = Builder::new(compiler(), &embed.cache).threads(3);
    let results =
        builder.compile_all(&units, |unit, result| done.lock().unwrap().push((unit.stem(), result.is_ok())));
    assert_eq!(results.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, true, false, true]);
    let mut done = done.into_inner().unwrap();
    done.sort();
    assert_eq!(done, [("a".into(), false), ("b".into(), true), ("c".into(), false), ("d".into(), true)]);
}

#[test]
fn sources_with_one_rust_name_are_refused() {
    let package = Package::new(&[("a-b.hip", GOOD), ("a_b.hip", GOOD)]);
    let text = package.embed(&[Arch::Gfx942]).run().unwrap_err().to_string();
    assert_eq!(text, "pkg/hip/a-b.hip and pkg/hip/a_b.hip both give the static A_B: rename one");
}
