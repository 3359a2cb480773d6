//! `hk bench`: time of the operators on a device, against what the device can do and against other implementations.

pub mod cases;
mod plot;
mod table;

use crate::{Failure, Result, list, out};
use cases::{Case, Set};
use hk_core::registry::{Described as _, Operator};
use hk_core::{Device, Stream};
use hk_testkit::measure::{self, Plan};
use std::path::PathBuf;
use table::{Peer, Row};

/// Options of `hk bench`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = "Times are of one call, medians of 100 passes on a GPU. Device time is between events; a pass is a \
    graph of calls. The operands are copies, used in turn, that exceed every cache together; `cached` uses one copy again \
    and again. Launch time is what the host takes to queue a call; host time lasts until the device is done, too. GB/s counts each input once and each output once, and is \
    compared with a device-to-device copy of 1 GiB in the same run, whose bytes count twice; TFLOP/s with the published rate \
    of the part's matrix units. On the emulator the times are the host's and say nothing about a GPU."
)]
pub struct Args {
    /// Only one family, such as `norm`.
    #[arg(long)]
    family: Option<String>,
    /// Only these operators.
    #[arg(long = "op", value_name = "OP")]
    operators: Vec<String>,
    /// Only cases whose name contains this.
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// Which sizes. Default: all on a GPU, `models` on the emulator.
    #[arg(long)]
    set: Option<Set>,
    /// The device, such as hip:0 or cuda:0. Default: HK_DEVICE, else an AMD GPU, else emu:gfx942.
    #[arg(long, value_name = "SPEC")]
    device: Option<String>,
    /// Passes that are timed.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    samples: Option<u16>,
    /// Launch each call by itself instead of passes as graphs.
    #[arg(long)]
    no_graph: bool,
    /// Do not compare the results with the f64 references first.
    #[arg(long)]
    no_check: bool,
    /// Print the cases as JSON, and measure nothing.
    #[arg(long)]
    list: bool,
    /// Take the rows of this CSV file of an earlier run, and measure nothing.
    #[arg(long, value_name = "FILE", conflicts_with = "list")]
    from: Option<PathBuf>,
    /// Times of other implementations: a CSV file with the columns operator, case, dtype, peer, device_us, cached_us, launch_us,
    /// host_us.
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Write the table as CSV.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write a plot of the shares of the device's rates as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    if args.list {
        let cases = chosen(args, args.set.unwrap_or(Set::All))?;
        return out::json(&cases.iter().map(Case::json).collect::<Vec<_>>());
    }
    let peers: Vec<Peer> = args.peers.as_deref().map_or(Ok(vec![]), table::read)?;
    let (rows, failed) = match &args.from {
        Some(path) => (table::read(path)?, vec![]),
        None => measure_all(args)?,
    };
    table::table(&rows, &peers).print()?;
    if let Some(path) = &args.csv {
        table::write(path, &rows, &peers)?;
    }
    if let Some(path) = &args.plot {
        plot::write(path, &rows, &peers)?;
    }
    if failed.is_empty() { Ok(()) } else { Err(Failure::new(failed.join("\n"))) }
}

/// The cases that the options name.
fn chosen(args: &Args, set: Set) -> Result<Vec<Case>> {
    for name in &args.operators {
        crate::operator(name)?;
    }
    let named =
        |op: &&&'static Operator| args.operators.is_empty() || args.operators.iter().any(|n| n == op.name);
    let operators = list::chosen(args.family.as_deref())?;
    let mut cases = Vec::new();
    for op in operators.iter().filter(named) {
        cases.extend(cases::of(op, set)?);
    }
    if let Some(text) = &args.case {
        cases.retain(|case| case.label.contains(text));
    }
    if cases.is_empty() {
        return Err(Failure::new("no case has these names"));
    }
    Ok(cases)
}

/// The rows, and what went wrong with the others.
fn measure_all(args: &Args) -> Result<(Vec<Row>, Vec<String>)> {
    let device = match &args.device {
        Some(spec) => Device::open(spec)?,
        None => Device::open_default()?,
    };
    let emulated = device.info().driver == "emu";
    let cases = chosen(args, args.set.unwrap_or(if emulated { Set::Models } else { Set::All }))?;
    let stream = device.create_stream()?;
    let mut plan = Plan::of(&device);
    plan.samples = args.samples.map_or(plan.samples, usize::from);
    plan.graph &= !args.no_graph;
    let copy = measure::copy_rate(&stream)?;
    let name = &device.info().name;
    eprintln!("device: {} ({name})", device.spec());
    match copy {
        Some(rate) => eprintln!("copy of 1 GiB on the device: {:.0} GB/s, read and written", rate / 1e9),
        None => eprintln!("times are the host's, of the emulation"),
    }
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for (i, case) in cases.iter().enumerate() {
        let what = format!("{} {} {}", case.call.operator().name, case.label, case.dtype());
        let verdict = match measure_one(&stream, case, &plan, !args.no_check) {
            Ok(Some(mut row)) => {
                row.copy_gb_s = copy.map(|rate| rate / 1e9);
                let verdict = format!("{:.2} us", row.device_us);
                rows.push(row);
                verdict
            }
            Ok(None) => "for other targets".into(),
            Err(failure) => {
                failed.push(format!("{what}: {failure}"));
                "FAILED".into()
            }
        };
        eprintln!("[{}/{}] {what}: {verdict}", i + 1, cases.len());
    }
    Ok((rows, failed))
}

/// None for a case that is one of other devices.
fn measure_one(stream: &Stream, case: &Case, plan: &Plan, check: bool) -> Result<Option<Row>> {
    let mut call = cases::with_even_routing(case.call.sample(1)?)?;
    if check {
        let compared = measure::check(stream, &mut call, plan);
        if measure::unserved(&compared) {
            return Ok(None);
        }
        if let Some(bad) = compared?.iter().find(|c| !c.passed()) {
            return Err(Failure::new(bad.to_string()));
        }
    }
    let measured = measure::measure(stream, &call, plan);
    if measure::unserved(&measured) {
        return Ok(None);
    }
    let measured = measured?;
    let (op, name) = (call.operator(), &stream.device().info().name);
    let dtype = call.tensors().next().map(|(_, t)| t.dtype());
    let flops = measure::flops_of(&call);
    let matrix =
        dtype.filter(|_| flops.is_some()).and_then(|dtype| measure::published_matrix_rate(name, dtype));
    Ok(Some(Row {
        operator: op.name.into(),
        case: case.label.clone(),
        dtype: case.dtype().into(),
        device: name.clone(),
        bytes: measure::bytes(&call),
        flops,
        copies: measured.copies,
        device_us: measured.device.median,
        device_us_p10: measured.device.low,
        device_us_p90: measured.device.high,
        cached_us: measured.cached.median,
        launch_us: measured.launch.median,
        host_us: measured.host.median,
        copy_gb_s: None,
        matrix_tflop_s: matrix.map(|rate| rate / 1e12),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_core::DType;
    use hk_core::registry::{Call, CallSpec, HostCall, HostTensor, HostTensorF64, Scalar, TensorSpec};
    use std::collections::BTreeSet;

    /// Of a large call some rows are compared, and they are those of the result.
    #[test]
    fn rows_of_a_result_are_compared() {
        let stream = Device::open("emu:gfx942").unwrap().create_stream().unwrap();
        let plan = Plan { compared: 1000, ..Plan::of(stream.device()) };
        let fp8 = DType::Fp8E4M3Fnuz;
        let fnuz = ("output", Scalar::Choice("fp8e4m3fnuz"));
        let (half, float) = (DType::Bf16, DType::F32);
        let check = |name: &str, tensors: &[(&str, DType, &[usize])], scalar: Option<(&str, Scalar)>| {
            let mut call: CallSpec = Call::new(crate::operator(name).unwrap());
            for &(name, dtype, shape) in tensors {
                call.set(name, TensorSpec::new(dtype, shape)).unwrap();
            }
            if let Some((name, value)) = scalar {
                call.set_scalar(name, value).unwrap();
            }
            let compared = measure::check(&stream, &mut call.sample(1).unwrap(), &plan).unwrap();
            assert!(compared.iter().all(|c| c.passed()), "{name}");
            compared[0].elements
        };
        assert_eq!(check("rmsnorm", &[("x", half, &[70, 100]), ("weight", half, &[100])], None), 10 * 100);
        assert_eq!(check("per_token_quant", &[("x", half, &[70, 100])], Some(fnuz)), 10 * 100);
        assert_eq!(check("top_p_sampling_from_probs", &[("probs", float, &[9, 400])], None), 2);
        // 2^7 operations are worth an element.
        let gemm = [("a", half, &[65, 64][..]), ("w", half, &[80, 64])];
        assert_eq!(check("gemm_a16w16", &gemm, None), 12 * 80);
        let scales = [("a_scale", float, &[65][..]), ("w_scale", float, &[1])];
        let gemm = [("a", fp8, &[65, 64][..]), ("w", fp8, &[80, 64]), scales[0], scales[1]];
        assert_eq!(check("gemm_a8w8", &gemm, None), 12 * 80);
        // Rows of several axes are compared all.
        assert_eq!(check("softmax", &[("x", half, &[3, 5, 100])], None), 1500);
    }

    fn example(op: &str, case: usize) -> HostCall {
        let op = crate::operator(op).unwrap();
        op.example(&op.cases[case], 1).unwrap()
    }

    /// Operators whose first case has prompts of 32 heads of 128 columns, and how many.
    const PROMPTS: [(&str, usize); 8] = [
        ("mha_varlen", 3),
        ("prefill_attn", 3),
        ("flash_attn_fwd_prefill", 3),
        ("lean_atten", 3),
        ("unified_attn", 2),
        ("extend_attn", 2),
        ("pa_prefill", 2),
        ("chunked_pa_prefill", 2),
    ];

    /// Of attention some queries of each sequence, which are those of the result.
    #[test]
    fn some_queries_are_compared() {
        let stream = Device::open("emu:gfx942").unwrap().create_stream().unwrap();
        let compared = |op: &str, case: usize, elements: u64| {
            let plan = Plan { compared: elements, ..Plan::of(stream.device()) };
            let compared = measure::check(&stream, &mut example(op, case), &plan).unwrap();
            assert!(compared.iter().all(|c| c.passed()), "{op}: {}", compared[0]);
            compared[0].elements
        };
        assert_eq!(compared("mha", 0, 1000), 32 * 128);
        assert_eq!(compared("mha", 0, 1 << 17), 8 * 32 * 128);
        assert_eq!(compared("mha", 0, 1 << 24), 128 * 32 * 128);
        assert_eq!(compared("mha", 1, 1000), 16 * 64);
        for (op, sequences) in PROMPTS {
            assert_eq!(compared(op, 0, 1000), sequences * 32 * 128, "{op}");
        }
    }

    /// What a reference of some queries has is what that of all has.
    #[test]
    fn a_limited_reference_has_the_same_results() {
        let mut shorter = BTreeSet::new();
        for op in crate::operators().iter().filter(|op| measure::is_attention(op)) {
            let mut call = example(op.name, 0);
            let all = (op.reference)(&call).unwrap();
            for limit in [1, 20_000_000] {
                call.limit_reference(limit);
                for ((name, all), (_, some)) in all.iter().zip((op.reference)(&call).unwrap()) {
                    let pairs = || all.values.iter().zip(&some.values);
                    let left_out = |(_, some): &(&f64, &f64)| HostTensorF64::is_untouched(**some);
                    let bits = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits();
                    assert!(pairs().filter(|p| !left_out(p)).all(bits), "{}: {name}, {limit}", op.name);
                    let untouched = all.values.iter().filter(|x| HostTensorF64::is_untouched(**x)).count();
                    if pairs().filter(left_out).count() > untouched {
                        shorter.insert(op.name);
                    }
                }
            }
        }
        PROMPTS.iter().for_each(|(op, _)| assert!(shorter.contains(op), "{op}"));
    }

    #[test]
    fn gemms_have_operations() {
        let gemm = |name: &str, a: &[usize], w: &[usize], dtype| {
            let mut call: CallSpec = Call::new(crate::operator(name).unwrap());
            call.set("a", TensorSpec::new(dtype, a)).unwrap();
            call.set("w", TensorSpec::new(dtype, w)).unwrap();
            measure::flops(&call)
        };
        assert_eq!(gemm("gemm_a16w16", &[3, 5], &[7, 5], DType::Bf16), Some(2 * 3 * 5 * 7));
        assert_eq!(gemm("batched_gemm_bf16", &[2, 3, 5], &[2, 7, 5], DType::Bf16), Some(2 * 2 * 3 * 5 * 7));
        assert_eq!(gemm("gemm_afp4wfp4", &[3, 32], &[7, 32], DType::Fp4x2), Some(2 * 3 * 64 * 7));
        let norm = crate::operator("rmsnorm").unwrap();
        assert_eq!(measure::flops(&norm.spec(&norm.cases[0]).unwrap()), None);
    }

    /// Pairs by the definition: query i stands at key i + sk - sq.
    fn pairs([sq, sk]: [i64; 2], causal: bool, window: [i64; 2]) -> u64 {
        let sees = |i: i64, j: i64| {
            let ahead = j - (i + sk - sq);
            let right = if causal { 0 } else { window[1] };
            (window[0] < 0 || -ahead <= window[0]) && (right < 0 || ahead <= right)
        };
        (0..sq).flat_map(|i| (0..sk).map(move |j| (i, j))).filter(|&(i, j)| sees(i, j)).count() as u64
    }

    /// Of operators whose lengths are data, too.
    #[test]
    fn sequences_of_attention_have_operations() {
        let lengths = |call: &HostCall, name: &str| -> Vec<i64> {
            call.optional(name).unwrap().to_f64().iter().map(|n| *n as i64).collect()
        };
        let both = |queries: &[i64], keys: &[i64]| -> Vec<[i64; 2]> {
            queries.iter().zip(keys).map(|(q, k)| [*q, *k]).collect()
        };
        for (op, case, heads_and_columns, left) in [
            ("prefill_attn", 0, 32 * 256, -1),
            ("flash_attn_fwd_prefill", 0, 32 * 256, -1),
            ("lean_atten", 0, 32 * 256, -1),
            ("lean_atten_paged", 1, 32 * 256, -1),
            ("unified_attn", 0, 32 * 256, -1),
            ("unified_attn", 1, 16 * 128, 127),
            ("pa_prefill", 0, 32 * 256, -1),
            ("chunked_pa_prefill", 0, 32 * 256, -1),
            ("extend_attn", 0, 32 * 256, -1),
            ("extend_attn", 1, 8 * 320, -1),
        ] {
            let call = example(op, case);
            let sequences = match (op, case) {
                ("prefill_attn", _) => both(&lengths(&call, "len"), &lengths(&call, "len")),
                ("flash_attn_fwd_prefill", _) => {
                    both(&lengths(&call, "seqused_q"), &lengths(&call, "seqused_k"))
                }
                ("lean_atten", _) => both(&[16; 3], &lengths(&call, "kv_lens")),
                ("lean_atten_paged", _) => both(&[4; 2], &lengths(&call, "kv_lens")),
                ("unified_attn", 0) => both(&[24; 2], &lengths(&call, "seqused_k")),
                ("unified_attn", _) => both(&[20; 3], &lengths(&call, "seqused_k")),
                ("extend_attn", 0) => vec![[24, 40 + 24]; 2],
                ("extend_attn", _) => vec![[20, 30 + 20]; 2],
                _ => both(&[24; 2], &lengths(&call, "seq_lens")),
            };
            let pairs: u64 = sequences.iter().map(|rows| pairs(*rows, true, [left, -1])).sum();
            assert_eq!(measure::flops_of(&call), Some(2 * pairs * heads_and_columns), "{op}: {sequences:?}");
        }
        let op = crate::operator("extend_attn").unwrap();
        let masked = op.corners.iter().find(|case| case.label.contains("mask")).unwrap();
        assert_eq!(measure::flops_of(&op.example(masked, 1).unwrap()), None, "the mask is data");
    }

    #[test]
    fn attention_has_operations_of_visible_pairs() {
        const HEADS_AND_COLUMNS: u64 = 4 * (8 + 6);
        for rows in [[5, 5], [3, 9], [9, 3], [1, 7], [0, 4], [4, 0]] {
            for causal in [false, true] {
                for window in [[-1, -1], [2, -1], [-1, 1], [2, 1], [0, 0], [100, 100]] {
                    let tensors = |mut call: CallSpec, batch: &[usize]| {
                        for (name, n, heads, columns) in
                            [("q", rows[0], 4, 8), ("k", rows[1], 2, 8), ("v", rows[1], 2, 6)]
                        {
                            let shape = [batch, &[n as usize, heads, columns]].concat();
                            call.set(name, TensorSpec::new(DType::Bf16, shape)).unwrap();
                        }
                        call.set_scalar("causal", Scalar::Bool(causal)).unwrap();
                        call.set_scalar("window_left", Scalar::Int(window[0])).unwrap();
                        call.set_scalar("window_right", Scalar::Int(window[1])).unwrap();
                        call
                    };
                    let want = 2 * HEADS_AND_COLUMNS * pairs(rows, causal, window);
                    let dense = tensors(Call::new(crate::operator("mha").unwrap()), &[3]);
                    assert_eq!(measure::flops(&dense), Some(3 * want), "{rows:?} {causal} {window:?}");
                    assert_eq!(measure::flops_of(&dense.sample(1).unwrap()), measure::flops(&dense));
                    // Five products, of which three have the columns of keys.
                    for name in ["mha_onekernel_bwd", "flash_attn_bwd", "mha_fused_bwd"] {
                        let of = tensors(Call::new(crate::operator(name).unwrap()), &[3]);
                        let columns = 4 * (3 * 8 + 2 * 6);
                        let want = 2 * columns * pairs(rows, causal, window);
                        assert_eq!(
                            measure::flops(&of),
                            Some(3 * want),
                            "{name} {rows:?} {causal} {window:?}"
                        );
                    }
                    let packed = tensors(Call::new(crate::operator("mha_varlen").unwrap()), &[]);
                    assert_eq!(measure::flops(&packed), None, "the lengths are data");
                    let mut packed = packed.sample(1).unwrap();
                    for (name, n) in [("cu_seqlens_q", rows[0]), ("cu_seqlens_k", rows[1])] {
                        packed.set(name, HostTensor::new([2], &[0, n as i32]).unwrap()).unwrap();
                    }
                    assert_eq!(measure::flops_of(&packed), Some(want), "{rows:?} {causal} {window:?}");
                }
            }
        }
    }
}
