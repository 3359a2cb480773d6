//! Time of an operator on a device.
//!
//! A pass is timed: consecutive calls of the operator between two events of the stream. On devices with graphs a pass is a graph, so
//! that host time per call is not included. The operands of a pass are several copies, used round-robin, that together exceed
//! every cache ([`Plan::footprint`]); or one copy, which stays cached if it fits.

use hk_core::registry::{
    ArgSpec, Call, CallSpec, Described, DeviceCall, HostCall, HostTensor, Named, Operator, Tolerance,
};
use hk_core::{DType, Device, Error, Event, Graph, Result, Stream};
use std::time::{Duration, Instant};

use crate::compare::{Comparison, compare_outputs};

/// Parameters of a measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Passes that are timed: at least one, and ten or more where so many take longer than ten seconds.
    pub samples: usize,
    /// Warm-up time.
    pub warm_up: Duration,
    /// Bytes of operands of a rotating pass.
    pub footprint: u64,
    /// A pass is a graph.
    pub graph: bool,
    /// Elements of input up to which a result is compared with the reference in all rows.
    pub compared: u64,
}

/// Most copies of operands: small ones are made within a second, and still exceed the L2 caches of GPUs.
const MOST_COPIES: u64 = 2048;
/// Calls of a pass over one copy.
const CACHED_CALLS: usize = 50;

impl Plan {
    /// For a GPU: 100 passes over 512 MiB, twice the largest of the caches (256 MiB on MI300X, 50 MiB of L2 on H100). For the
    /// emulator, whose time is that of the host and depends on no cache: a pass of one call.
    pub fn of(device: &Device) -> Self {
        let compared = 1 << 24;
        match device.info().driver {
            "emu" => Self { samples: 1, warm_up: Duration::ZERO, footprint: 0, graph: false, compared },
            _ => Self {
                samples: 100,
                warm_up: Duration::from_millis(50),
                footprint: 512 << 20,
                graph: true,
                compared,
            },
        }
    }

    /// Copies of the operands that a rotating pass uses.
    fn copies(&self, call: &HostCall) -> usize {
        self.footprint.div_ceil(bytes(call).max(1)).clamp(1, MOST_COPIES) as usize
    }

    /// Calls of a pass over one copy.
    fn cached_calls(&self) -> usize {
        if self.footprint == 0 { 1 } else { CACHED_CALLS }
    }
}

/// Bytes that the call has to move.
pub fn bytes(call: &HostCall) -> u64 {
    let traffic = (call.operator().traffic)(call);
    traffic.read + traffic.written
}

/// Multiplications and additions of the GEMMs of a call, or of attention and its gradients over visible pairs of queries and keys, as far as they
/// follow from shapes ([`flops_of`]); none of other operators.
pub fn flops(call: &CallSpec) -> Option<u64> {
    let values = |name: &str| {
        let t = call.optional(name)?;
        let packed = if t.dtype() == DType::Fp4x2 { 2 } else { 1 };
        Some(packed * t.shape().iter().product::<usize>() as u64)
    };
    // An axis, counted from the last.
    let axis = |name: &str, i: usize| call.optional(name)?.shape().iter().nth_back(i).map(|&n| n as u64);
    // x [.., M, K] by w [.., N, K].
    let gemm = |x: &str, w: &str| Some(values(x)? * axis(w, 1)?);
    let terms = match call.operator().name {
        "ff_fused_gated" | "ff_fused_ungated" => axis("x", 1)? * (values("w_up")? + values("w_down")?),
        "gmm" => axis("lhs", 1)? * axis("rhs", 0)? * axis("rhs", 1)?,
        "ptgmm" | "nptgmm" => values("lhs")? * axis("rhs", 0)?,
        "fused_bmm_rope_kv_cache" => gemm("q_nope", "w")?,
        _ if has_pairs(call.operator()) => {
            return attention_flops(call, &sequences(call, |_| None)?);
        }
        name if name.contains("gemm") => {
            let one = gemm("x", "w").or_else(|| gemm("a", "w"));
            let two = [("x_fp8", "w_fp8"), ("x_fp4", "w_fp4"), ("x_bf16", "w_bf16")];
            one.or_else(|| two.into_iter().filter_map(|(x, w)| gemm(x, w)).reduce(|a, b| a + b))?
        }
        _ => return None,
    };
    Some(2 * terms)
}

/// [`flops`] of a call with its data, which has the lengths of sequences.
pub fn flops_of(call: &HostCall) -> Option<u64> {
    if !has_pairs(call.operator()) {
        return flops(&call.spec());
    }
    attention_flops(call, &sequences(call, |name| Some(call.optional(name)?.to_f64()))?)
}

/// Whether an output of the operator is attention.
pub fn is_attention(op: &Operator) -> bool {
    let is = |of| matches!(of, Some(Tolerance::Attention | Tolerance::AttentionFp8));
    op.args.iter().any(|arg| is(arg.role.output()))
}

/// Whether the operator has gradients of attention by its log-sum-exp.
fn is_gradient(op: &Operator) -> bool {
    op.arg("lse").is_some_and(|arg| arg.role.is_input()) && op.arg("dq").is_some()
}

/// Whether operations are those of pairs of queries and keys.
fn has_pairs(op: &Operator) -> bool {
    is_attention(op) || is_gradient(op)
}

/// Queries and keys of each sequence of attention, by the names that operators have for their lengths, whose values `data` gives. None
/// where they are not known, or where starts of sequences fall.
fn sequences<V: Described>(call: &Call<V>, data: impl Fn(&str) -> Option<Vec<f64>>) -> Option<Vec<[u64; 2]>> {
    let given = |names: [&'static str; 4]| names.into_iter().find(|name| call.optional(name).is_some());
    let lengths = |name| Some(data(name)?.into_iter().map(|n| n as u64).collect::<Vec<_>>());
    let between = |name| {
        let length = |pair: &[f64]| (pair[0] <= pair[1]).then(|| (pair[1] - pair[0]) as u64);
        data(name)?.windows(2).map(length).collect::<Option<Vec<_>>>()
    };
    let batched = |name| match *call.optional(name)?.shape() {
        [sequences, rows, _, _] => Some(vec![rows as u64; sequences]),
        _ => None,
    };
    let queries = match given(["seqused_q", "len", "cu_seqlens_q", "qo_indptr"]) {
        Some(name @ ("seqused_q" | "len")) => lengths(name)?,
        Some(name) => between(name)?,
        // Packed rows of sequences whose keys have lengths are of as many queries each.
        None => batched("q").or_else(|| {
            let (q, keys) = (call.optional("q")?.shape(), call.optional("kv_lens")?.shape()[0]);
            Some(vec![(q[usize::from(heads_first(call))] / keys.max(1)) as u64; keys])
        })?,
    };
    let keys = match given(["seqused_k", "seq_lens", "kv_lens", "len"]) {
        Some(name) => lengths(name)?,
        None if call.optional("cu_seqlens_k").is_some() => between("cu_seqlens_k")?,
        // Those before the queries.
        None if call.optional("kv_indptr").is_some() => {
            between("kv_indptr")?.iter().zip(&queries).map(|(before, queries)| before + queries).collect()
        }
        None => batched("k")?,
    };
    (queries.len() == keys.len()).then(|| queries.into_iter().zip(keys).map(|(q, k)| [q, k]).collect())
}

/// Whether queries have heads before rows, by their description.
fn heads_first<V: Described>(call: &Call<V>) -> bool {
    call.operator().arg("q").is_some_and(|arg| arg.shape.starts_with("[Hq"))
}

/// Operations of attention of sequences of so many queries and keys. None with a mask that is data.
fn attention_flops<V: Described>(call: &Call<V>, sequences: &[[u64; 2]]) -> Option<u64> {
    if call.optional("custom_mask").is_some() {
        return None;
    }
    let reach = |name| u64::try_from(call.int(name).ok()?).ok();
    // Operators with one window are causal.
    let causal = call.bool("causal").unwrap_or(call.int("window").is_ok());
    let left = reach("window_left").or(reach("window"));
    let right = if causal { Some(0) } else { reach("window_right") };
    let pairs: u64 = sequences.iter().map(|rows| visible_pairs(*rows, left, right)).sum();
    let [.., a, b, dqk] = *call.optional("q")?.shape() else { return None };
    let heads = if heads_first(call) { a } else { b };
    if is_gradient(call.operator()) {
        // Scores, their gradients, and the gradients of the three tensors.
        let dv = *call.optional("v")?.shape().last()?;
        return Some(2 * pairs * (heads * (3 * dqk + 2 * dv)) as u64);
    }
    let outputs = (call.operator().outputs)(&call.spec()).ok()?;
    let (_, out) = outputs.iter().find(|(name, _)| *name == "out")?;
    Some(2 * pairs * (heads * (dqk + out.shape.last()?)) as u64)
}

/// Pairs of queries and keys of a sequence: query `i` stands at key `p = i + keys - queries` and sees `[p - left, p + right]`.
fn visible_pairs([queries, keys]: [u64; 2], left: Option<u64>, right: Option<u64>) -> u64 {
    // Counted from `queries` before the first key, so that nothing is negative.
    let end = queries + keys;
    let of_query = |i: u64| {
        let p = i + keys;
        let first = left.map_or(0, |n| p.saturating_sub(n)).max(queries);
        let last = right.map_or(end, |n| p.saturating_add(n).saturating_add(1).min(end));
        last.saturating_sub(first)
    };
    (0..queries).map(of_query).sum()
}

/// Compares the operator's result with its f64 reference: all of it up to [`Plan::compared`] elements of input or operations,
/// else as many rows. (Those of samplers are the first, since their random numbers count the rows.) References that can leave out
/// rows themselves, such as those of attention, do ([`Call::limit_reference`]).
///
/// # Errors
/// What the operator or its reference answers.
pub fn check(stream: &Stream, call: &mut HostCall, plan: &Plan) -> Result<Vec<Comparison>> {
    // The reference multiplies in plain loops, about 2^30 operations a second: an element is worth 2^7.
    call.limit_reference(plan.compared << 7);
    let call = &*call;
    let op = call.operator();
    let outputs = op.execute(stream, call)?;
    let Some((_, first)) = call.tensors().next() else { return compare_outputs(op, call, &outputs) };
    let rows = first.shape().first().copied().unwrap_or(0);
    let work = (first.shape().iter().product::<usize>() as u64).max(flops_of(call).unwrap_or(0) >> 7);
    if work <= plan.compared || !has_rows(call, &outputs, rows) {
        return compare_outputs(op, call, &outputs);
    }
    let some = u128::from(plan.compared) * rows as u128 / u128::from(work);
    let some = some.clamp(1, rows.max(1) as u128) as usize;
    let picked: Vec<usize> = match op.family {
        "hk-sampling" => (0..some).collect(),
        // From the first to the last, in equal steps.
        _ => (0..some).map(|i| i * (rows - 1) / (some - 1).max(1)).collect(),
    };
    let (call, outputs) = rows_of(call, &outputs, &picked)?;
    compare_outputs(op, &call, &outputs)
}

/// Whether the first axis of an argument is that of the rows, by its description.
fn along_rows(call: &HostCall, name: &str) -> bool {
    let leads =
        |arg: &ArgSpec| ["[M", "[..,", "[rows", "[R", "[B]"].iter().any(|axis| arg.shape.starts_with(axis));
    call.operator().arg(name).is_some_and(leads)
}

/// Whether the first axis of all tensors along the rows has that length, so that some rows make a call of their own.
fn has_rows(call: &HostCall, outputs: &Named<HostTensor>, rows: usize) -> bool {
    let mut tensors = call.tensors().chain(outputs.iter().map(|(name, t)| (*name, t)));
    let whole = |name, t: &HostTensor| {
        t.shape().len() <= 2 && t.shape().first() == Some(&rows) && along_rows(call, name)
    };
    let first = call.tensors().next();
    first.is_some_and(|(name, t)| whole(name, t))
        && tensors.all(|(name, t)| {
            whole(name, t) || !along_rows(call, name) || t.bytes().len() == t.dtype().size_bytes()
        })
        && outputs.iter().all(|(name, t)| whole(name, t))
}

/// The part of a call that has these rows.
fn rows_of(
    call: &HostCall,
    outputs: &Named<HostTensor>,
    rows: &[usize],
) -> Result<(HostCall, Named<HostTensor>)> {
    let part = |name: &str, tensor: &HostTensor| {
        let has_rows = along_rows(call, name) && tensor.shape().first().is_some_and(|&n| n > 1);
        if has_rows { taken(tensor, rows) } else { Ok(tensor.clone()) }
    };
    let mut some = HostCall::new(call.operator());
    for (name, tensor) in call.tensors() {
        some.set(name, part(name, tensor)?)?;
    }
    for (name, value) in call.scalars() {
        some.set_scalar(name, value)?;
    }
    for name in call.wanted() {
        some.want(name)?;
    }
    let outputs = outputs.iter().map(|(name, t)| Ok((*name, part(name, t)?))).collect::<Result<_>>()?;
    Ok((some, outputs))
}

/// These rows of a tensor.
fn taken(tensor: &HostTensor, rows: &[usize]) -> Result<HostTensor> {
    let mut spec = tensor.spec();
    let stride = tensor.bytes().len() / spec.shape[0].max(1);
    spec.shape[0] = rows.len();
    let bytes = rows.iter().flat_map(|i| &tensor.bytes()[i * stride..][..stride]).copied().collect();
    HostTensor::from_bytes(spec, bytes)
}

/// Consecutive calls.
pub struct Pass<'a> {
    stream: &'a Stream,
    calls: Vec<DeviceCall>,
    /// How often it loops over them.
    rounds: usize,
    graph: Option<Graph>,
}

impl<'a> Pass<'a> {
    /// Over copies of the operands that exceed every cache.
    ///
    /// # Errors
    /// As [`DeviceCall::prepare`], what the operator answers, and failures of the device.
    pub fn rotating(stream: &'a Stream, call: &HostCall, plan: &Plan) -> Result<Self> {
        Self::new(stream, call, plan, plan.copies(call), 1)
    }

    /// Over one copy, repeatedly.
    ///
    /// # Errors
    /// As [`rotating`](Self::rotating).
    pub fn cached(stream: &'a Stream, call: &HostCall, plan: &Plan) -> Result<Self> {
        Self::new(stream, call, plan, 1, plan.cached_calls())
    }

    fn new(stream: &'a Stream, call: &HostCall, plan: &Plan, copies: usize, rounds: usize) -> Result<Self> {
        let calls = (0..copies).map(|_| DeviceCall::prepare(stream, call)).collect::<Result<_>>()?;
        let mut pass = Self { stream, calls, rounds, graph: None };
        // Loads the kernels and makes the workspaces, which a capture cannot.
        pass.queue()?;
        stream.synchronize()?;
        if plan.graph {
            pass.graph = Some(stream.capture(|| pass.queue())?);
        }
        Ok(pass)
    }

    /// Calls of a pass.
    pub fn calls(&self) -> usize {
        self.calls.len() * self.rounds
    }

    /// Queues all of them.
    ///
    /// # Errors
    /// What the operator answers; [`Error::Driver`].
    pub fn queue(&mut self) -> Result<()> {
        match &self.graph {
            // SAFETY: the pass owns all buffers, which are used on this stream only.
            Some(graph) => unsafe { graph.launch(self.stream) },
            None => {
                (0..self.rounds).try_for_each(|_| self.calls.iter_mut().try_for_each(|c| run(self.stream, c)))
            }
        }
    }

    /// Queues `n` single calls, round-robin over the copies.
    ///
    /// # Errors
    /// As [`queue`](Self::queue).
    pub fn queue_singly(&mut self, calls: usize) -> Result<()> {
        let copies = self.calls.len();
        (0..calls).try_for_each(|i| run(self.stream, &mut self.calls[i % copies]))
    }

    /// Time of `n` passes, between events.
    ///
    /// # Errors
    /// As [`queue`](Self::queue), and failures of the device.
    pub fn time(&mut self, passes: usize) -> Result<Duration> {
        let start = self.stream.record()?;
        (0..passes).try_for_each(|_| self.queue())?;
        self.stream.record()?.elapsed_since(&start)
    }

    /// Time of one call in each of many passes.
    fn sample(&mut self, plan: &Plan) -> Result<Times> {
        let start = Instant::now();
        let mut pass = Duration::ZERO;
        while start.elapsed() < plan.warm_up {
            pass = self.time(1)?;
        }
        // Nothing waits in between: the next pass is queued while one runs.
        let mut events: Vec<Event> = vec![self.stream.record()?];
        for _ in 0..affordable(pass, plan.samples) {
            self.queue()?;
            events.push(self.stream.record()?);
        }
        let calls = self.calls() as f64;
        let us = |pair: &[Event]| Ok(pair[1].elapsed_since(&pair[0])?.as_secs_f64() * 1e6 / calls);
        Ok(Times::of(events.windows(2).map(us).collect::<Result<_>>()?))
    }

    /// Times of one call on the host's clock, one by one: until the last is queued, and until the device is done with it.
    fn with_host(&mut self, plan: &Plan) -> Result<[Times; 2]> {
        let calls = match plan.footprint {
            0 => 1,
            _ => affordable((self.time(1)? * 10).div_f64(self.calls() as f64), 200.max(self.calls.len())),
        };
        let pass = |this: &mut Self| {
            this.stream.synchronize()?;
            let start = Instant::now();
            this.queue_singly(calls)?;
            let queued = start.elapsed();
            this.stream.synchronize()?;
            Ok([queued, start.elapsed()].map(|t| t.as_secs_f64() * 1e6 / calls as f64))
        };
        let passes = (0..plan.samples.clamp(1, 5)).map(|_| pass(self)).collect::<Result<Vec<_>>>()?;
        Ok([0, 1].map(|i| Times::of(passes.iter().map(|pass| pass[i]).collect())))
    }
}

/// Repetitions of something of this duration: as many as requested, or those of ten seconds, but at least ten.
fn affordable(each: Duration, wanted: usize) -> usize {
    let seconds = each.as_secs_f64().max(1e-9);
    wanted.min(((10.0 / seconds) as usize).max(10)).max(1)
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    (call.operator().run)(stream, call)
}

/// Time of one call in microseconds, over samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// The median.
    pub median: f64,
    /// A tenth of the samples is below.
    pub low: f64,
    /// A tenth of the samples is above.
    pub high: f64,
}

impl Times {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| samples[((samples.len() - 1) as f64 * share).round() as usize];
        Self { median: at(0.5), low: at(0.1), high: at(0.9) }
    }
}

/// Measured times of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Copies of the operands, used round-robin.
    pub copies: usize,
    /// On the device, with operands that are not cached.
    pub device: Times,
    /// On the device, with the same operands in every call.
    pub cached: Times,
    /// On the host's clock until the call is queued: host time per launch.
    pub launch: Times,
    /// On the host's clock, the launch of each call included, with operands that are not cached.
    pub host: Times,
}

/// Measures a call.
///
/// # Errors
/// As [`Pass::rotating`].
pub fn measure(stream: &Stream, call: &HostCall, plan: &Plan) -> Result<Measured> {
    let mut rotating = Pass::rotating(stream, call, plan)?;
    let (device, [launch, host]) = (rotating.sample(plan)?, rotating.with_host(plan)?);
    let copies = rotating.calls.len();
    drop(rotating);
    let cached = Pass::cached(stream, call, plan)?.sample(plan)?;
    Ok(Measured { copies, device, cached, launch, host })
}

/// Bytes a second of a copy from device to device, of 1 GiB: each byte counts once for its read and once for its write.
/// None on the emulator.
///
/// # Errors
/// [`Error::Driver`], if there is not enough memory or the driver fails.
pub fn copy_rate(stream: &Stream) -> Result<Option<f64>> {
    const BYTES: usize = 1 << 30;
    if stream.device().info().driver == "emu" {
        return Ok(None);
    }
    let from = stream.alloc_zeroed::<u8>(BYTES)?;
    let mut to = stream.alloc_zeroed::<u8>(BYTES)?;
    let mut copy = || {
        let start = stream.record()?;
        stream.copy(&from, &mut to)?;
        stream.record()?.elapsed_since(&start)
    };
    for _ in 0..10 {
        copy()?;
    }
    let us = (0..50).map(|_| Ok(copy()?.as_secs_f64() * 1e6)).collect::<Result<_>>()?;
    Ok(Some(2.0 * BYTES as f64 / (Times::of(us).median * 1e-6)))
}

/// Published operations a second of a part's matrix units, dense, for GEMMs of these elements: no kernel measures them.
/// None for a part that is not listed.
pub fn published_matrix_rate(name: &str, dtype: DType) -> Option<f64> {
    // Of bf16 and of 8 bits, in TFLOP/s. Sources: the parts' data sheets.
    const RATES: [(&str, f64, f64); 6] = [
        ("H100 80GB HBM3", 989.0, 1979.0),
        ("H200", 989.0, 1979.0),
        ("MI300X", 1307.0, 2615.0),
        ("MI325X", 1307.0, 2615.0),
        ("MI350X", 2307.0, 4614.0),
        ("MI355X", 2517.0, 5033.0),
    ];
    let (_, half, byte) = RATES.iter().find(|(part, ..)| name.ends_with(part))?;
    match dtype {
        DType::Bf16 | DType::F16 => Some(half * 1e12),
        DType::I8 | DType::U8 | DType::Fp8E4M3 | DType::Fp8E4M3Fnuz => Some(byte * 1e12),
        _ => None,
    }
}

/// Whether an error of the operator means that this device does not serve the call.
pub fn unserved<T>(result: &Result<T>) -> bool {
    matches!(result, Err(Error::Unsupported { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_the_median_and_the_tenths() {
        let times = Times::of((0..=100).rev().map(f64::from).collect());
        assert_eq!(times, Times { median: 50.0, low: 10.0, high: 90.0 });
        assert_eq!(Times::of(vec![3.0]), Times { median: 3.0, low: 3.0, high: 3.0 });
    }

    #[test]
    fn slow_passes_are_repeated_less() {
        assert_eq!(affordable(Duration::from_millis(1), 100), 100);
        assert_eq!(affordable(Duration::from_millis(500), 100), 20);
        assert_eq!(affordable(Duration::from_secs(60), 100), 10);
        assert_eq!(affordable(Duration::ZERO, 0), 1);
        assert_eq!(affordable(Duration::from_secs(60), 1), 1);
    }

    #[test]
    fn rates_are_those_of_the_part() {
        let rate = |name, dtype| published_matrix_rate(name, dtype).map(|r| r / 1e12);
        assert_eq!(rate("NVIDIA H200", DType::Bf16), Some(989.0));
        assert_eq!(rate("NVIDIA H100 80GB HBM3", DType::Fp8E4M3), Some(1979.0));
        assert_eq!(rate("AMD Instinct MI355X", DType::I8), Some(5033.0));
        // Parts of the same generation with other rates.
        assert_eq!(rate("NVIDIA H200 NVL", DType::Bf16), None);
        assert_eq!(rate("NVIDIA H100 PCIe", DType::Bf16), None);
        assert_eq!(rate("NVIDIA H20", DType::Bf16), None);
        assert_eq!(rate("NVIDIA H200", DType::F32), None);
    }
}
