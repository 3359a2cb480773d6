//! A Llama decoder layer on 2, 4 and 8 GPUs by tensor parallelism, compared with the same layer on one.
//!
//! `cargo run -p hk-comm --example tensor_parallel` runs a small one on emulated GPUs, with `llama-3-8b` one of that model. `HK_TEST_DEVICES`
//! names others, rank by rank: `HK_TEST_DEVICES=hip:0,hip:1`, with the feature of their driver.

use hk_activation::{QkvOutputs, fused_qkv_split_qk_rope};
use hk_attention::{AttentionOptions, AttentionOutputs, Mask, Qkv, mha};
use hk_comm::{Algorithm, NormOptions, NormOutputs, P2pComm, P2pOptions, all_reduce_rmsnorm};
use hk_core::plan::rope::{Positions, Rope, RopeDirection, RopeSpan, RopeStyle, RopeTableWidth, RopeTables};
use hk_core::{Device, Fp8E4M3, Layout, Result, Stream, TensorView, TensorViewMut, bf16};
use hk_gemm::{Activation, Gemm};
use hk_norm::{RmsNormOptions, rmsnorm};

/// Tokens, hidden columns, heads, heads of keys and values, columns of a head, columns of the feed-forward part.
pub type Sizes = [usize; 6];
pub(crate) const SMALL: Sizes = [12, 512, 16, 8, 64, 1024];
const LLAMA: Sizes = [128, 4096, 32, 8, 128, 14336];
const ROPE: Rope = Rope {
    style: RopeStyle::Neox,
    table: RopeTableWidth::Half,
    rotary: 0,
    span: RopeSpan::First,
    direction: RopeDirection::Forward,
};

/// Pseudo-random values, uniform in `-size .. size`.
fn random(seed: u64, n: usize, size: f32) -> Vec<bf16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        bf16::from_f32(((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * size)
    };
    (0..n).map(|_| next()).collect()
}

/// Weights of a GEMM: columns, and a row for each of its outputs. Rank `r` of `world` has a part.
struct Weights(usize, Vec<bf16>);
impl Weights {
    /// Such that outputs are about as large as inputs.
    fn new(seed: u64, rows: usize, cols: usize) -> Self {
        Self(cols, random(seed, rows * cols, (3.0 / cols as f32).sqrt()))
    }

    /// A part of the outputs: heads, or columns of the feed-forward part.
    fn of_outputs(&self, r: usize, world: usize) -> Vec<bf16> {
        let part = self.1.len() / world;
        self.1[r * part..][..part].to_vec()
    }

    /// A part of the inputs: with it the outputs are partial sums.
    fn of_inputs(&self, r: usize, world: usize) -> Vec<bf16> {
        self.1.chunks(self.0 / world).skip(r).step_by(world).flatten().copied().collect()
    }
}

/// Adds the sum of all ranks' partial sums to the residual, and normalizes that.
fn reduce(
    comm: &mut P2pComm,
    partial: TensorView<bf16>,
    weight: TensorView<bf16>,
    [residual, normed]: [TensorViewMut<bf16>; 2],
) -> Result<()> {
    let stream = comm.stream().clone();
    let outputs = NormOutputs::<_, Fp8E4M3> { residual, out: Some(normed), quantized: None };
    all_reduce_rmsnorm(comm, &stream, partial, weight, outputs, NormOptions::default(), Algorithm::Auto)
}

/// The layer on one rank: the residual and the normalized rows that the next layer begins with.
fn layer([tokens, hidden, heads, kv_heads, d, ffn]: Sizes, comm: &mut P2pComm) -> Result<[Vec<bf16>; 2]> {
    let (stream, r, world): (&Stream, _, _) = (&comm.stream().clone(), comm.rank(), comm.world());
    // Every rank has a part of the heads and of the feed-forward part.
    let part = |seed, rows| Weights::new(seed, rows, hidden).of_outputs(r, world);
    let qkv = [part(1, heads * d), part(2, kv_heads * d), part(3, kv_heads * d)].concat();
    let gate_up = [part(4, ffn), part(5, ffn)].concat();
    let w_out = stream.upload(&Weights::new(6, hidden, heads * d).of_inputs(r, world))?;
    let w_down = stream.upload(&Weights::new(7, hidden, ffn).of_inputs(r, world))?;
    let (w_qkv, w_gate_up) = (stream.upload(&qkv)?, stream.upload(&gate_up)?);
    let norms = stream.upload(&random(8, 3 * hidden, 1.5))?;
    let norm = |i: usize| norms.view_with(Layout::contiguous([hidden])?, i * hidden);
    let angle = |i: usize| (i / (d / 2)) as f32 * 500_000f32.powf((i % (d / 2)) as f32 / -((d / 2) as f32));
    let table = |f: fn(f32) -> f32| (0..tokens * d / 2).map(|i| f(angle(i))).collect::<Vec<_>>();
    let (cos, sin) = (stream.upload(&table(f32::cos))?, stream.upload(&table(f32::sin))?);

    let (heads, kv_heads, ffn) = (heads / world, kv_heads / world, ffn / world);
    let buffer = |cols: usize| stream.alloc_zeroed::<bf16>(tokens * cols);
    let (qkv_cols, rows) = ((heads + 2 * kv_heads) * d, |cols: usize| [tokens, cols]);
    let (mut normed, mut qkv, mut partial) = (buffer(hidden)?, buffer(qkv_cols)?, buffer(hidden)?);
    let (mut q, mut k, mut v) = (buffer(heads * d)?, buffer(kv_heads * d)?, buffer(kv_heads * d)?);
    let (mut attended, mut gated) = (buffer(heads * d)?, buffer(ffn)?);
    let mut residual = stream.upload(&random(9, tokens * hidden, 2.0))?;
    let all = rows(hidden);
    rmsnorm(stream, residual.view(all)?, norm(0)?, normed.view_mut(all)?, RmsNormOptions::default())?;
    let (w, y) = (w_qkv.view([qkv_cols, hidden])?, qkv.view_mut(rows(qkv_cols))?);
    Gemm::new(normed.view(all)?, w).run(stream, y)?;
    let (cos, sin) = (cos.view([tokens, d / 2])?, sin.view([tokens, d / 2])?);
    let tables = RopeTables { cos, sin, positions: Positions::Index, offsets: None };
    let [of_q, of_k] = [heads, kv_heads].map(|heads| [tokens, heads, d]);
    let outputs = QkvOutputs { q: q.view_mut(of_q)?, k: k.view_mut(of_k)?, v: v.view_mut(of_k)? };
    fused_qkv_split_qk_rope(stream, qkv.view(rows(qkv_cols))?, tables, outputs, Rope { rotary: d, ..ROPE })?;
    let [of_q, of_k] = [heads, kv_heads].map(|heads| [1, tokens, heads, d]);
    let inputs = Qkv { q: q.view(of_q)?, k: k.view(of_k)?, v: v.view(of_k)? };
    let outputs = AttentionOutputs { out: attended.view_mut(of_q)?, lse: None };
    mha(stream, inputs, outputs, None, &AttentionOptions { mask: Mask::CAUSAL, ..Default::default() })?;
    let (a, w) = (attended.view(rows(heads * d))?, w_out.view([hidden, heads * d])?);
    Gemm::new(a, w).run(stream, partial.view_mut(all)?)?;
    reduce(comm, partial.view(all)?, norm(1)?, [residual.view_mut(all)?, normed.view_mut(all)?])?;

    let gate_up = Gemm::new(normed.view(all)?, w_gate_up.view([2 * ffn, hidden])?).gated();
    gate_up.activation(Activation::Silu).run(stream, gated.view_mut(rows(ffn))?)?;
    Gemm::new(gated.view(rows(ffn))?, w_down.view([hidden, ffn])?).run(stream, partial.view_mut(all)?)?;
    reduce(comm, partial.view(all)?, norm(2)?, [residual.view_mut(all)?, normed.view_mut(all)?])?;
    comm.check()?;
    Ok([stream.download(&residual)?, stream.download(&normed)?])
}

/// The layer on so many of the devices, each of which has a thread.
fn on_ranks(sizes: Sizes, devices: &[String], world: usize) -> Result<Vec<[Vec<bf16>; 2]>> {
    let open = |spec: &String| Device::open(spec)?.create_stream();
    let streams = devices.iter().take(world).map(open).collect::<Result<Vec<_>>>()?;
    let ranks = P2pComm::new(&streams, &P2pOptions { buffer_bytes: 1 << 20, ..Default::default() })?;
    std::thread::scope(|scope| {
        let start = |mut comm| scope.spawn(move || layer(sizes, &mut comm));
        let threads: Vec<_> = ranks.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Each number of ranks beside one.
pub fn compare(sizes: Sizes, devices: &[String]) -> Result<()> {
    let alone = on_ranks(sizes, devices, 1)?.remove(0);
    for world in [2, 4, 8].into_iter().filter(|&world| world <= devices.len()) {
        let ranks = on_ranks(sizes, devices, world)?;
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "all ranks have the same bits");
        for (name, got, want) in [("residual", &ranks[0][0], &alone[0]), ("norm", &ranks[0][1], &alone[1])] {
            let size = want.iter().fold(0f32, |size, v| size.max(v.to_f32().abs()));
            let error = got.iter().zip(want).fold(0f32, |e, (a, b)| e.max((a.to_f32() - b.to_f32()).abs()));
            println!("{world} ranks, {name}: at most {error:.4} from one rank's, which is up to {size:.2}");
            assert!(error <= size / 128.0, "within an ulp of bf16 of the largest value");
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let sizes = if std::env::args().any(|arg| arg == "llama-3-8b") { LLAMA } else { SMALL };
    let emulated = |_| (0..8).map(|r| format!("emu:gfx942:{r}")).collect::<Vec<_>>().join(",");
    let list = std::env::var("HK_TEST_DEVICES").unwrap_or_else(emulated);
    compare(sizes, &list.split(',').map(str::to_owned).collect::<Vec<_>>())
}
