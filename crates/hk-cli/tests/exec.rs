//! `hk exec`: kernels of a foreign code object, on both targets.

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::path::PathBuf;
use std::process::{Command, Output};

/// `mix` takes a list of arguments; `slots` reads the same from 16-byte slots, which its list does not show.
const SOURCE: &str = r#"
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 256)))
KERNEL void mix(const float *x, float *y, float factor, int n, short *count) {
  int i = __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
  if (i < n) y[i] = factor * x[i];
  if (i == 0) count[0] += (short)n;
}
struct Slots { const float *x; long _0; float *y; long _1; float factor; int _2[3]; int n; int _3[3]; };
KERNEL void slots(Slots s) {
  int i = __builtin_amdgcn_workgroup_id_y() * 64 + __builtin_amdgcn_workitem_id_x();
  if (i < s.n) s.y[i] = s.factor * s.x[i];
}
"#;

/// A folder with the code object of each target and `in.safetensors`.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        let files = Files(tempfile::tempdir().unwrap());
        let source = files.path("kernels.hip");
        std::fs::write(&source, SOURCE).unwrap();
        let compiler = hk_build::Search::from_env().find().unwrap();
        for target in TARGETS {
            let built = Command::new(&compiler.path)
                .args([
                    "-x",
                    "hip",
                    "--offload-device-only",
                    "--no-gpu-bundle-output",
                    "-nogpulib",
                    "-nogpuinc",
                ])
                .args(["-O2", &format!("--offload-arch={target}"), "-o"])
                .args([files.path(&format!("{target}.co")), source.clone()])
                .output()
                .unwrap();
            assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        }
        let x: Vec<u8> = (0..100).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let x = TensorView::new(Dtype::F32, vec![10, 10], &x).unwrap();
        let count = TensorView::new(Dtype::I16, vec![1], &[5, 0]).unwrap();
        let bytes = safetensors::serialize([("x", x), ("count", count)], None).unwrap();
        std::fs::write(files.path("in.safetensors"), bytes).unwrap();
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn exec(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hk"));
        command.current_dir(self.0.path()).arg("exec").args(args).output().unwrap()
    }

    #[track_caller]
    fn succeeds(&self, args: &[&str]) -> String {
        let output = self.exec(args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn fails(&self, args: &[&str], status: i32, part: &str) {
        let output = self.exec(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {text}");
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }

    /// Type, shape and bytes of an output.
    fn output(&self, name: &str) -> (Dtype, Vec<usize>, Vec<u8>) {
        let bytes = std::fs::read(self.path("out.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let t = file.tensor(name).unwrap();
        (t.dtype(), t.shape().to_vec(), t.data().to_vec())
    }
}

const TARGETS: [&str; 2] = ["gfx942", "gfx950"];
const LAUNCH: [&str; 6] = ["--kernel", "mix", "--grid", "2", "--block", "64"];

fn half_floats(n: usize) -> Vec<u8> {
    (0..n).flat_map(|i| (i as f32 / 2.0).to_le_bytes()).collect()
}

#[test]
fn listed_arguments_go_to_their_places() {
    let files = Files::new();
    std::fs::write(files.path("args.json"), r##"["#x", "out:y=f32[4,25]", "f32:0.5"]"##).unwrap();
    for target in TARGETS {
        let object = format!("{target}.co");
        let mut args = vec![&*object];
        args.extend(LAUNCH);
        args.extend(["--in", "in.safetensors", "--out", "out.safetensors", "--args", "args.json"]);
        args.extend(["--arg", "i32:100", "--arg", "inout:in.safetensors#count", "--json"]);
        let json: serde_json::Value = serde_json::from_str(&files.succeeds(&args)).unwrap();
        assert_eq!((&json["kernel"], &json["target"]), (&"mix".into(), &target.into()));
        assert_eq!((&json["waves"], &json["grid"]), (&2.into(), &serde_json::json!([2, 1, 1])));
        assert_eq!(files.output("y"), (Dtype::F32, vec![4, 25], half_floats(100)));
        assert_eq!(files.output("count"), (Dtype::I16, vec![1], vec![105, 0]));
    }
}

#[test]
fn time_is_modelled_and_the_kernel_executed() {
    let files = Files::new();
    let given =
        ["--in", "in.safetensors", "--out", "out.safetensors", "--arg", "#x", "--arg", "out:y=f32[100]"];
    let more = ["--arg", "f32:0.5", "--arg", "i32:100", "--arg", "inout:#count"];
    let with = |object, time: &[&'static str]| [&[object], &LAUNCH[..], &given, &more, time].concat();
    let text = files.succeeds(&with("gfx942.co", &["--time", "--part", "mi308x", "--stalls"]));
    assert!(text.contains("mi308x: modelled, error ") && text.contains("| mix "), "{text}");
    assert!(text.contains("v_"), "instructions, without a line table: {text}");
    assert_eq!(files.output("y").2, half_floats(100));
    assert_eq!(files.output("count").2, [105, 0], "launched once");
    let text = files.succeeds(&with("gfx950.co", &["--time"]));
    assert!(text.contains("mi355x: modelled"), "{text}");
    files.fails(&with("gfx942.co", &["--time", "--part", "mi355x"]), 1, "the part mi355x runs gfx950");
    files.fails(
        &with("gfx942.co", &["--time", "--part", "h100"]),
        1,
        "no part `h100`, expected one of mi300x",
    );
    files.fails(&with("gfx942.co", &["--part", "mi308x"]), 1, "need --time");
}

#[test]
fn slots_and_offsets_reach_what_is_not_listed() {
    let files = Files::new();
    let want: Vec<u8> = [half_floats(70), vec![0xEE; 4 * 3]].concat();
    let common = [
        "--kernel",
        "slots",
        "--grid",
        "1,2",
        "--block",
        "64",
        "--in",
        "in.safetensors",
        "--out",
        "out.safetensors",
    ];
    let slots = ["--slot", "16", "--arg", "#x", "--arg", "out:y=f32[73],fill=0xEE", "--arg", "f32:0.5"];
    let offsets = ["--arg", "@0=#x", "--arg", "@32=f32:0.5", "--arg", "@16=out:y=f32[73],fill=0xee"];
    for (given, n) in [(&slots[..], "i32:70"), (&offsets[..], "@48=hex:46000000")] {
        let args = [&["gfx942.co"], &common[..], given, &["--arg", n, "--stats"]].concat();
        assert!(files.succeeds(&args).contains("| workgroups "));
        assert_eq!(files.output("y").2, want);
    }
}

#[test]
fn kernels_and_their_arguments_are_listed() {
    let files = Files::new();
    let list: Vec<serde_json::Value> =
        serde_json::from_str(&files.succeeds(&["gfx950.co", "--list", "--json"])).unwrap();
    let kernels: Vec<_> = list.iter().map(|k| k["kernel"].as_str().unwrap()).collect();
    assert_eq!(kernels, ["mix", "slots"]);
    let offsets: Vec<_> = list[0]["arguments"].as_array().unwrap().iter().map(|a| &a["offset"]).collect();
    assert_eq!(offsets, [0, 8, 16, 20, 24]);
    assert_eq!((&list[0]["target"], &list[0]["argument_bytes"]), (&"gfx950".into(), &32.into()));
    let table = files.succeeds(&["gfx950.co", "--list", "--kernel", "mi"]);
    assert!(table.contains("mix for gfx950: 32 bytes") && !table.contains("slots"), "{table}");
    assert!(table.contains("|     24 |     8 | -        | global_buffer |"), "{table}");
}

#[test]
fn wrong_arguments_say_what_is_wrong() {
    let files = Files::new();
    let with = |more: &[&'static str]| [&["gfx942.co"], &LAUNCH[..], more].concat();
    let given = ["--in", "in.safetensors", "--arg", "#x", "--arg", "out:y=f32[100]"];
    for (more, part) in [
        (&["--arg", "f32:0.5"][..], "3 arguments are given, the kernel lists 5"),
        (&["--arg", "f64:0.5"], "argument 2 has 8 bytes, the kernel's, at byte 16, has 4"),
        (&["--arg", "@12=i32:1"], "argument 2 has 4 bytes at byte 12, where argument 1 is, at byte 8"),
        (&["--arg", "@30=i32:1"], "argument 2 has 4 bytes at byte 30, the kernel's arguments end at byte 32"),
        (&["--arg", "@24=#z"], "no tensor `z`; it has count, x"),
        (
            &["--arg", "f32:1", "--arg", "i32:1", "--arg", "out:y=f32[9]"],
            "output `y` has two types or shapes",
        ),
        (
            &["--arg", "f32:1", "--arg", "i32:1", "--arg", "#count", "--arg", "i32:1"],
            "argument 5 is one too many",
        ),
        // What the kernel does is checked as everywhere.
        (&["--arg", "f32:1", "--arg", "i32:101", "--arg", "#count"], "out-of-bounds read"),
    ] {
        files.fails(&with(&[&given, more].concat()), 1, part);
    }
    files.fails(&with(&["--arg", "@0=#x"]), 1, "#x: which file?");
    files.fails(&["gfx942.co", "--grid", "1", "--block", "64"], 1, "choose one with --kernel: mix, slots");
    files.fails(&["gfx942.co", "--grid", "1", "--block", "64", "--kernel", "m"], 1, "no kernel `m`");
    files.fails(&["in.safetensors", "--list"], 1, "no ELF signature");
    files.fails(&["none.co", "--list"], 1, "none.co: ");
    files.fails(&with(&["--args", "in.safetensors"]), 1, "not a JSON list of strings");
    files.fails(&with(&["--arg", "i32:x"]), 2, "`x` is no i32");
    files.fails(&with(&["--slot", "0"]), 2, "--slot");
    files.fails(&["gfx942.co", "--grid", "1,2,3,4", "--block", "64"], 2, "expected X, X,Y or X,Y,Z");
    files.fails(&["gfx942.co", "--block", "64"], 2, "--grid");
}
