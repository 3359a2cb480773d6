//! `hk run`, as a user runs it: safetensors in, safetensors out.

use hk_core::{Float, bf16, f16};
use hk_norm::{RmsNormOptions, RoundMode, WeightOffset, reference};
use hk_testkit::{Array, Tolerance, assert_close};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const DEVICES: [&str; 2] = ["emu:gfx942", "emu:gfx950"];

/// A directory for the files of one test.
struct Files {
    dir: tempfile::TempDir,
}

/// A tensor for a file.
struct Given {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn given<T: bytemuck::Pod>(name: &'static str, dtype: Dtype, shape: &[usize], data: &[T]) -> Given {
    Given { name, dtype, shape: shape.into(), bytes: bytemuck::cast_slice(data).to_vec() }
}

impl Files {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes `in.safetensors`.
    fn input(&self, tensors: &[Given]) {
        let views =
            tensors.iter().map(|t| (t.name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
        fs::write(self.path("in.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    /// `hk run` on that file.
    fn run(&self, args: &[&str]) -> Output {
        let (input, output) = (self.path("in.safetensors"), self.path("out.safetensors"));
        let mut command = hk(&["run"]);
        command.args(args).arg("--in").arg(input).arg("--out").arg(output).output().unwrap()
    }

    /// Tensors of `out.safetensors`, with their bytes.
    fn output(&self) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
        let bytes = fs::read(self.path("out.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Vec<_> = file
            .iter()
            .map(|(name, t)| (name.to_owned(), t.dtype(), t.shape().to_vec(), t.data().to_vec()))
            .collect();
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        tensors
    }

    /// `hk run` fails with status 1, says all of `parts`, and writes nothing.
    #[track_caller]
    fn fails(&self, args: &[&str], parts: &[&str]) {
        expect_failure(&self.run(args), 1, parts);
        assert!(!self.path("out.safetensors").exists());
    }
}

fn hk(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hk"));
    command.args(args).env_remove("HK_DEVICE");
    command
}

#[track_caller]
fn expect_failure(output: &Output, status: i32, parts: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{text}");
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

#[track_caller]
fn succeed(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn values<T: Float>(n: usize) -> Vec<T> {
    (0..n).map(|i| T::from_f64(((i * 37 % 101) as f64 - 50.0) / 16.0)).collect()
}

fn wide<T: Float>(data: &[T]) -> Vec<f64> {
    data.iter().map(|x| x.to_f64()).collect()
}

fn elements<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// Three axes, a type for the weights of their own, options and an optional output.
#[test]
fn rmsnorm_makes_the_round_trip() {
    let (x, weight) = (values::<bf16>(2 * 3 * 130), values::<f32>(130));
    let files = Files::new();
    files.input(&[given("x", Dtype::BF16, &[2, 3, 130], &x), given("weight", Dtype::F32, &[130], &weight)]);
    let options =
        RmsNormOptions { eps: 1e-3, weight_offset: WeightOffset::One, round_mode: RoundMode::ModelSensitive };
    let want = reference::rmsnorm::<bf16>(&wide(&x), &wide(&weight), options);
    for device in DEVICES {
        let params = ["eps=1e-3", "weight_offset=1", "round_mode=model_sensitive"];
        let mut args = vec!["rmsnorm", "--device", device, "--want", "rstd"];
        params.iter().for_each(|p| args.extend(["--param", *p]));
        succeed(&files.run(&args));
        let [(rstd_name, rstd_type, rstd_shape, rstd), (y_name, y_type, y_shape, y)] = &files.output()[..]
        else {
            panic!("two outputs");
        };
        assert_eq!((&**y_name, y_type, &**y_shape), ("y", &Dtype::BF16, &[2, 3, 130][..]));
        assert_eq!((&**rstd_name, rstd_type, &**rstd_shape), ("rstd", &Dtype::F32, &[6][..]));
        let y = Array::new(device, &**y_shape, elements::<bf16>(y));
        // The model-sensitive mode rounds twice: a value near a tie can go either way by a step each time.
        let wrong =
            y.iter().zip(&want.y).filter(|(a, b)| (a.to_f64() - **b).abs() > 2.0 * 8e-3 * b.abs() + 1e-5);
        assert_eq!(wrong.count(), 0);
        assert_close(
            &Array::new(device, &**rstd_shape, elements::<f32>(rstd)),
            &want.rstd,
            Tolerance::Reduction,
        );
    }
}

#[test]
fn fused_add_rmsnorm_makes_the_round_trip_with_every_option() {
    let (x, residual) = (values::<f16>(5 * 64), values::<f16>(7 * 64)[64..6 * 64].to_vec());
    let weight = values::<f16>(64);
    let files = Files::new();
    files.input(&[
        given("x", Dtype::F16, &[5, 64], &x),
        given("residual_in", Dtype::F16, &[5, 64], &residual),
        given("weight", Dtype::F16, &[64], &weight),
    ]);
    let options = RmsNormOptions { eps: 1e-6, ..Default::default() };
    let want = reference::fused_add_rmsnorm::<f16>(&wide(&x), &wide(&residual), &wide(&weight), options);
    for device in DEVICES {
        let args = ["fused_add_rmsnorm", "--device", device, "--check", "--stats", "--sanitize"];
        let text = succeed(&files.run(&args));
        let outputs = files.output();
        let names: Vec<_> = outputs.iter().map(|t| (&*t.0, t.1, &*t.2)).collect();
        let shape = &[5, 64][..];
        assert_eq!(names, [("residual_out", Dtype::F16, shape), ("y", Dtype::F16, shape)]);
        let array = |i: usize| Array::new(device, [5, 64], elements::<f16>(&outputs[i].3));
        assert_close(&array(0), &want.residual_out, Tolerance::Exact);
        assert_close(&array(1), &want.y, Tolerance::Reduction);
        // --check
        assert!(
            text.contains("| y f16 ") && text.contains("| residual_out f16 ") && text.contains(" ok "),
            "{text}"
        );
        // --stats: each tensor once.
        let (read, written) = ((2 * 5 * 64 + 64) * 2, 2 * 5 * 64 * 2);
        for (what, floor) in [("read", read), ("written", written)] {
            let row = text.lines().find(|l| l.starts_with(&format!("| {what} "))).expect(&text);
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            assert_eq!((cells[3], cells[4]), (&*floor.to_string(), &*floor.to_string()), "{text}");
        }
        // Rows of 128 bytes, each a line.
        let cells = |what: &str| -> Vec<String> {
            let row = text.lines().find(|l| l.starts_with(&format!("| {what} "))).expect(&text);
            row.split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        assert_eq!((&*cells("read")[6], &*cells("written")[6]), ("11", "10"), "{text}");
        assert_eq!(cells("  of bank conflicts")[2], "0", "{text}");
        assert!(text.contains("fused_add_rmsnorm_f16_64: ") && text.contains("| instructions "), "{text}");
    }
}

/// `--json` is all that the tables say, by kernel and line; nothing else goes to standard output.
#[test]
fn json_has_the_counters_of_each_line() {
    let files = Files::new();
    files.input(&good());
    let args = [
        "rmsnorm",
        "--device",
        "emu:gfx950",
        "--json",
        "--stats",
        "--hot",
        "--check",
        "--sanitize=waits,lds",
    ];
    let report: serde_json::Value = serde_json::from_str(&succeed(&files.run(&args))).unwrap();
    assert_eq!((&report["operator"], &report["passed"]), (&"rmsnorm".into(), &true.into()));
    assert_eq!((&report["error"], &report["fault"]), (&serde_json::Value::Null, &serde_json::Value::Null));
    let [kernel] = &report["kernels"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!(kernel["counters"], report["counters"]);
    let lines = kernel["lines"].as_array().unwrap();
    assert!(lines.iter().any(|l| l["file"].as_str().is_some_and(|f| f.ends_with("rms_rows.h"))));
    for count in ["instructions", "valu", "global_read_bytes", "transcendental"] {
        let sum: u64 = lines.iter().map(|l| l["counters"][count].as_u64().unwrap()).sum();
        assert_eq!(sum, report["counters"][count], "{count}");
    }
    assert_eq!(report["counters"]["details"]["distinct_read_bytes"], 2 * 2 * 8 + 2 * 8);
}

#[test]
fn the_device_is_the_one_of_the_environment_and_can_be_left_to_it() {
    let files = Files::new();
    files.input(&[
        given("x", Dtype::F32, &[1, 4], &[3.0f32, 4.0, 0.0, 0.0]),
        given("weight", Dtype::F32, &[4], &[1.0f32; 4]),
    ]);
    let input = files.path("in.safetensors");
    let args = ["run", "rmsnorm", "--check", "--in", input.to_str().unwrap()];
    succeed(&hk(&args).env("HK_DEVICE", "emu:gfx950").output().unwrap());
    let output = hk(&args).env("HK_DEVICE", "emu:gfx000").output().unwrap();
    expect_failure(&output, 1, &["Device::open: spec: `emu:gfx000`, expected emu:gfx942"]);
}

#[test]
fn no_rows_are_no_work() {
    let files = Files::new();
    files.input(&[
        given::<u16>("x", Dtype::BF16, &[0, 8], &[]),
        given("weight", Dtype::BF16, &[8], &[0x3f80u16; 8]),
    ]);
    succeed(&files.run(&["rmsnorm", "--device", "emu:gfx942", "--check", "--stats", "--sanitize"]));
    assert_eq!(files.output()[0].2, [0, 8]);
}

/// The tensors of `rmsnorm` as they should be.
fn good() -> [Given; 2] {
    [given("x", Dtype::BF16, &[2, 8], &[0x3f80u16; 16]), given("weight", Dtype::BF16, &[8], &[0x3f80u16; 8])]
}

#[test]
fn wrong_tensors_are_refused() {
    let files = Files::new();
    let args = ["rmsnorm", "--device", "emu:gfx942"];
    let [x, weight] = good();

    files.input(&[x]);
    files.fails(&args, &["rmsnorm: weight: no tensor, expected a tensor"]);

    let [x, _] = good();
    let extra = given("bias", Dtype::BF16, &[8], &[0u16; 8]);
    files.input(&[x, weight, extra]);
    files.fails(&args, &["rmsnorm: input: `bias`, expected one of x, weight"]);

    let [_, weight] = good();
    files.input(&[given("x", Dtype::I32, &[2, 8], &[1i32; 16]), weight]);
    files.fails(&args, &["rmsnorm: x: dtype i32, expected bf16, f16, f32"]);

    let [_, weight] = good();
    files.input(&[given("x", Dtype::F64, &[2, 8], &[1f64; 16]), weight]);
    files.fails(&args, &["in.safetensors: tensor `x`: dtype F64, expected one of F32, F16, BF16"]);

    let [x, _] = good();
    files.input(&[x, given("weight", Dtype::F16, &[8], &[0u16; 8])]);
    files.fails(&args, &["rmsnorm: weight: dtype f16"]);

    let [x, _] = good();
    files.input(&[x, given("weight", Dtype::BF16, &[7], &[0u16; 7])]);
    files.fails(&args, &["rmsnorm: weight: shape [7], expected [8]"]);

    let [x, _] = good();
    files.input(&[x, given("weight", Dtype::BF16, &[2, 4], &[0u16; 8])]);
    files.fails(&args, &["rmsnorm: weight: shape [2, 4], expected 1 axis: [cols]"]);

    files.input(&[
        given::<u16>("x", Dtype::BF16, &[2, 0], &[]),
        given::<u16>("weight", Dtype::BF16, &[0], &[]),
    ]);
    files.fails(&args, &["rmsnorm: x: axis 1 has length zero"]);
}

#[test]
fn wrong_files_are_refused() {
    let files = Files::new();
    let args = ["rmsnorm", "--device", "emu:gfx942"];
    files.fails(&args, &["in.safetensors: ", "No such file"]);

    files.input(&good());
    let whole = fs::read(files.path("in.safetensors")).unwrap();
    let mut long_header = whole.clone();
    long_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut no_json = whole.clone();
    no_json[8] = b'[';
    for corrupt in [&[][..], &whole[..7], &whole[..40], &whole[..whole.len() - 1], &long_header, &no_json] {
        fs::write(files.path("in.safetensors"), corrupt).unwrap();
        files.fails(&args, &["in.safetensors: not a safetensors file: "]);
    }

    fs::write(files.path("in.safetensors"), &whole).unwrap();
    let input = files.path("in.safetensors");
    let output = Path::new("no-such-directory/out.safetensors");
    let mut command = hk(&["run", "rmsnorm", "--device", "emu:gfx942"]);
    let output = command.arg("--in").arg(input).arg("--out").arg(output).output().unwrap();
    expect_failure(&output, 1, &["no-such-directory/out.safetensors: "]);
}

#[test]
fn wrong_names_and_values_are_refused() {
    let files = Files::new();
    files.input(&good());
    let on = |args: &[&'static str]| [&["rmsnorm", "--device", "emu:gfx942"], args].concat();
    expect_failure(&files.run(&on(&["--sanitize=race"])), 2, &["unknown check \"race\""]);
    expect_failure(
        &files.run(&on(&["--hot=time"])),
        2,
        &["instructions, valu, passes, lines, lds, conflicts"],
    );
    files.fails(&["rmsnrom"], &["no operator `rmsnrom`, expected one of rmsnorm, fused_add_rmsnorm"]);
    files
        .fails(&["rmsnorm", "--device", "gpu"], &["`gpu`, expected emu:gfx942, emu:gfx950, hip:N or cuda:N"]);
    files.fails(&["rmsnorm", "--device", "emu:gfx942?speed=9"], &["`emu:gfx942?speed=9`"]);
    files.fails(&["rmsnorm", "--device", "hip:0"], &["device hip:0: "]);
    let unknown = "`epsilon`, expected one of eps, weight_offset, round_mode";
    files.fails(&on(&["--param", "epsilon=1"]), &[unknown]);
    files.fails(&on(&["--param", "eps=small"]), &["rmsnorm: eps: `small`, expected a real number"]);
    files.fails(&on(&["--param", "eps=-1"]), &["rmsnorm: eps: -1", "not negative"]);
    files.fails(&on(&["--param", "eps=nan"]), &["rmsnorm: eps: NaN"]);
    files.fails(&on(&["--param", "weight_offset=2"]), &["rmsnorm: weight_offset: 2, expected 0 or 1"]);
    files.fails(&on(&["--param", "round_mode=up"]), &["`up`, expected one of f32, model_sensitive"]);
    files.fails(&on(&["--want", "mean"]), &["rmsnorm: output: `mean`"]);
    files.fails(&on(&["--want", "y"]), &["rmsnorm: output: `y`, expected an optional output"]);
}

/// Sizes that wrap, and lengths below zero.
#[test]
fn numbers_out_of_range_are_refused() {
    let files = Files::new();
    files.input(&[
        given("a", Dtype::BF16, &[1, 8], &values::<bf16>(8)),
        given("w", Dtype::BF16, &[16, 8], &values::<bf16>(128)),
    ]);
    for splits in ["0", "-1", "65536", "9223372036854775807"] {
        let splits = format!("splits={splits}");
        let args = ["gemm_a16w16", "--param", "tile=64x64", "--param", &splits];
        files.fails(&args, &["gemm_a16w16: ", "splits", "65535"]);
    }
    files.input(&[given("plain", Dtype::BF16, &[16, 8], &values::<bf16>(128))]);
    files.fails(&["shuffle_weight", "--param", "columns=-1"], &["shuffle_weight: columns: -1"]);
    files.fails(
        &["shuffle_weight", "--param", "columns=9223372036854775807"],
        &["shuffle_weight: shuffled", "limit"],
    );
}

#[test]
fn a_wrong_command_line_is_status_2() {
    let files = Files::new();
    files.input(&good());
    let input = files.path("in.safetensors");
    let input = input.to_str().unwrap();
    expect_failure(&files.run(&["rmsnorm", "--param", "eps"]), 2, &["expected NAME=VALUE"]);
    expect_failure(&files.run(&["rmsnorm", "--fast"]), 2, &["--fast"]);
    expect_failure(&hk(&["run", "rmsnorm", "--in", input]).output().unwrap(), 2, &["--out"]);
    expect_failure(&hk(&["run", "rmsnorm", "--check"]).output().unwrap(), 2, &["--in"]);
    expect_failure(&hk(&["walk"]).output().unwrap(), 2, &["walk"]);
    expect_failure(&hk(&[]).output().unwrap(), 2, &["Usage"]);
}
