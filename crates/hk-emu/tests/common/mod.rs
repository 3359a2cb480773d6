//! Kernels for the tests: compiled from HIP C++ or assembled, and run.
#![allow(dead_code)] // each test file uses its part

pub mod gemm;

use std::process::Command;
use std::sync::Arc;

use hk_emu::{Checks, Counters, Dispatch, Fault, Machine, MachineOptions, Module};

/// `HK_CLANG`, then the versioned names of Debian and Ubuntu, then the plain name.
pub fn clang() -> Command {
    if let Some(path) = std::env::var_os("HK_CLANG") {
        return Command::new(path);
    }
    let names = ["clang++-22", "clang++-21", "clang++-20", "clang++"];
    let found = names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    Command::new(
        found.expect("these tests compile kernels: apt-get install clang-22 lld-22, or set HK_CLANG"),
    )
}

fn run_clang(name: &str, source: &str, extension: &str, args: &[&str]) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let input = dir.path().join(format!("{name}.{extension}"));
    let output = dir.path().join(format!("{name}.co"));
    std::fs::write(&input, source).expect("the source is written");
    let result = clang().args(args).arg(&input).arg("-o").arg(&output).output().expect("clang runs");
    // clang quotes the lines that it complains about.
    assert!(result.status.success(), "{name}: {}", String::from_utf8_lossy(&result.stderr));
    std::fs::read(&output).expect("the code object is read")
}

/// Declarations that stand in for the HIP headers.
const PRELUDE: &str = r#"
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define KERNEL extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(1, 1024)))
#define TID __builtin_amdgcn_workitem_id_x()
#define BID __builtin_amdgcn_workgroup_id_x()
#define BARRIER() do { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); __builtin_amdgcn_s_barrier(); __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); } while (0)
typedef unsigned u32; typedef unsigned long long u64; typedef int i32; typedef long long i64;
typedef unsigned char u8; typedef unsigned short u16; typedef _Float16 f16;
#line 1 "kernel.hip"
"#;

/// Compiles HIP C++ for `cpu` (`gfx942`, `gfx950`) with an optimisation level such as `-O3`.
pub fn hip(cpu: &str, level: &str, source: &str) -> Vec<u8> {
    hip_with(cpu, level, source, &[])
}

/// The same with more arguments.
pub fn hip_with(cpu: &str, level: &str, source: &str, more: &[&str]) -> Vec<u8> {
    let arch = format!("--offload-arch={cpu}");
    let mut args = vec![
        "-x",
        "hip",
        "--offload-device-only",
        "--no-gpu-bundle-output",
        &arch,
        "-nogpulib",
        "-nogpuinc",
        "-std=c++20",
        level,
        "-gline-tables-only",
        "-ffp-contract=fast-honor-pragmas",
        "-mcode-object-version=5",
    ];
    args.extend(more);
    run_clang("kernel", &format!("{PRELUDE}{source}"), "hip", &args)
}

/// The assembly that [`hip`] would assemble.
pub fn text(cpu: &str, level: &str, source: &str) -> String {
    String::from_utf8(hip_with(cpu, level, source, &["-S"])).expect("assembly is text")
}

/// Assembles what [`text`] gave, or parts of it.
pub fn link(cpu: &str, text: &str) -> Vec<u8> {
    let cpu = format!("-mcpu={cpu}");
    run_clang("kernel", text, "s", &["-x", "assembler", "--target=amdgcn-amd-amdhsa", &cpu])
}

/// What an assembled kernel has.
pub struct Assembly<'a> {
    pub cpu: &'a str,
    /// The instructions; `s_endpgm` is added.
    pub body: &'a str,
    /// Descriptor directives beside the usual ones.
    pub directives: &'a str,
    pub vgprs: u32,
    pub accum_offset: u32,
    pub lds: u32,
    pub scratch: u32,
}

impl Default for Assembly<'_> {
    fn default() -> Self {
        Assembly { cpu: "gfx942", body: "", directives: "", vgprs: 128, accum_offset: 64, lds: 0, scratch: 0 }
    }
}

/// Assembles a kernel `test` with one pointer argument: s[0:1] is the argument segment, s2 the workgroup, v0 the thread.
pub fn assemble(a: &Assembly<'_>) -> Vec<u8> {
    let Assembly { cpu, body, directives, vgprs, accum_offset, lds, scratch } = a;
    // The assembler's default flushes f32 denormals, clang's keeps them.
    let denormals =
        if directives.contains("float_denorm_mode_32") { "" } else { ".amdhsa_float_denorm_mode_32 3" };
    let source = format!(
        r#"
.amdgcn_target "amdgcn-amd-amdhsa--{cpu}"
.text
.globl test
.p2align 8
.type test,@function
test:
{body}
  s_endpgm
.Lend:
.size test, .Lend-test
.rodata
.p2align 6
.amdhsa_kernel test
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_next_free_sgpr 96
  .amdhsa_accum_offset {accum_offset}
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_kernarg_size 8
  {denormals}
  {directives}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: test
    .symbol: test.kd
    .kernarg_segment_size: 8
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {scratch}
    .wavefront_size: 64
    .sgpr_count: 102
    .vgpr_count: {vgprs}
    .agpr_count: {agprs}
    .max_flat_workgroup_size: 1024
    .args:
      - .name: data
        .size: 8
        .offset: 0
        .value_kind: global_buffer
        .address_space: global
...
.end_amdgpu_metadata
"#,
        agprs = vgprs - accum_offset,
    );
    let cpu = format!("-mcpu={cpu}");
    run_clang("kernel", &source, "s", &["-x", "assembler", "--target=amdgcn-amd-amdhsa", &cpu])
}

/// The options of most tests. `HK_SANITIZE` adds checks: every kernel of the tests should be clean under them, or
/// broken on purpose.
pub fn options(cpu: &str) -> MachineOptions {
    let checks = std::env::var("HK_SANITIZE").unwrap_or_default();
    let checks = checks.parse().expect("HK_SANITIZE names checks");
    MachineOptions::default().arch(cpu.parse().expect("a known target")).sanitize(checks)
}

/// The same with these checks.
pub fn sanitized(cpu: &str, checks: impl Into<Checks>) -> MachineOptions {
    options(cpu).sanitize(checks.into())
}

/// A machine with a loaded module.
pub struct Rig {
    pub machine: Machine,
    pub module: Arc<Module>,
}

impl Rig {
    pub fn new(options: MachineOptions, image: &[u8]) -> Rig {
        let machine = Machine::new(options);
        let module = machine.load(image).expect("the code object loads");
        Rig { machine, module }
    }

    pub fn hip(cpu: &str, source: &str) -> Rig {
        Rig::new(options(cpu), &hip(cpu, "-O3", source))
    }

    /// A buffer with these bytes.
    pub fn upload<T: ToBytes>(&self, label: &str, data: &[T]) -> u64 {
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.bytes()).collect();
        let addr = self.machine.alloc(bytes.len() as u64, 256, label).expect("memory");
        self.machine.write(addr, &bytes).expect("upload");
        addr
    }

    pub fn download<T: ToBytes>(&self, addr: u64, len: usize) -> Vec<T> {
        let mut bytes = vec![0; len * T::SIZE];
        self.machine.read(addr, &mut bytes).expect("download");
        bytes.chunks(T::SIZE).map(T::from_bytes).collect()
    }

    pub fn launch(&self, kernel: &str, grid: u32, block: u32, args: &Args) -> Result<Counters, Fault> {
        let dispatch = Dispatch { grid: [grid, 1, 1], block: [block, 1, 1], dynamic_lds: 0, args: &args.0 };
        self.machine.launch(&self.module, kernel, &dispatch)
    }
}

/// Packed kernel arguments, each at its natural alignment.
#[derive(Default)]
pub struct Args(pub Vec<u8>);

impl Args {
    pub fn new() -> Args {
        Args::default()
    }

    #[must_use]
    pub fn push<T: ToBytes>(mut self, value: T) -> Args {
        while !self.0.len().is_multiple_of(T::SIZE) {
            self.0.push(0);
        }
        self.0.extend(value.bytes());
        self
    }
}

pub trait ToBytes {
    const SIZE: usize;
    fn bytes(&self) -> Vec<u8>;
    fn from_bytes(bytes: &[u8]) -> Self;
}

macro_rules! to_bytes {
    ($($t:ty)*) => {$(
        impl ToBytes for $t {
            const SIZE: usize = size_of::<$t>();
            fn bytes(&self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn from_bytes(bytes: &[u8]) -> Self {
                <$t>::from_le_bytes(bytes.try_into().expect("whole elements"))
            }
        }
    )*};
}
to_bytes!(u8 u16 u32 u64 i32 i64 f32 f64);

/// Pseudo-random words; the same for the same seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ self.0 >> 33;
        (x.wrapping_mul(0xFF51_AFD7_ED55_8CCD) >> 32) as u32
    }

    /// A float in -1..1.
    pub fn unit(&mut self) -> f32 {
        self.next() as f32 / 2f32.powi(31) - 1.0
    }
}

/// Instructions of one wave that find s[4:5] = v[2:3] = a buffer and v1 = 4 * lane.
pub struct Body<'a> {
    pub cpu: &'a str,
    pub text: &'a str,
    pub lds: u32,
    pub scratch: u32,
    pub options: MachineOptions,
}

impl<'a> Body<'a> {
    pub fn new(text: &'a str) -> Body<'a> {
        Body { cpu: "gfx942", text, lds: 0, scratch: 0, options: MachineOptions::default() }
    }

    /// The buffer afterwards, or what went wrong.
    pub fn try_run(&self, data: &[u32]) -> Result<Vec<u32>, Fault> {
        let Body { cpu, text, lds, scratch, .. } = *self;
        let prologue = "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_lshlrev_b32 v1, 2, v0\n  s_waitcnt lgkmcnt(0)\n  v_mov_b32 v2, s4\n  v_mov_b32 v3, s5\n";
        let body: String =
            prologue.lines().chain(text.lines()).map(|l| format!("  {}\n", l.trim())).collect();
        let image = assemble(&Assembly { cpu, body: &body, lds, scratch, ..Assembly::default() });
        let options = self.options.clone().arch(cpu.parse().expect("a known target"));
        let rig = Rig::new(options, &image);
        let buffer = rig.upload("data", data);
        rig.launch("test", 1, 64, &Args::new().push(buffer))?;
        Ok(rig.download(buffer, data.len()))
    }

    /// The buffer afterwards.
    pub fn run(&self, data: &[u32]) -> Vec<u32> {
        self.try_run(data).unwrap_or_else(|fault| panic!("{}: {fault}", self.text))
    }
}
