//! The safe function of `hip/split.hip`.

use crate::kernels::split::Params;
use hk_core::{
    Element, Error, Float, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut, check_aliases,
};

const OP: &str = "fused_qkvzba_split";

/// The entry points of elements of 2 and of 4 bytes: vectorized, scalar.
static KERNELS: [[KernelRef<Params>; 2]; 2] = [
    [Params::kernel("split_16"), Params::kernel("split_16_scalar")],
    [Params::kernel("split_32"), Params::kernel("split_32_scalar")],
];
/// Threads of a block.
const THREADS: u64 = 256;

/// Heads and their sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadSizes {
    /// Heads of q and of k.
    pub k_heads: usize,
    /// Heads of v and z, a multiple of `k_heads`.
    pub v_heads: usize,
    /// Elements of a head of q and of k.
    pub k_dim: usize,
    /// Elements of a head of v and of z.
    pub v_dim: usize,
}

/// The outputs of [`fused_qkvzba_split`].
#[derive(Debug)]
pub struct SplitOutputs<'a, T: Element> {
    /// `[T, 2 k_heads K + v_heads V]`.
    pub qkv: TensorViewMut<'a, T>,
    /// `[T, v_heads, V]`.
    pub z: TensorViewMut<'a, T>,
    /// `[T, v_heads]`.
    pub b: TensorViewMut<'a, T>,
    /// `[T, v_heads]`.
    pub a: TensorViewMut<'a, T>,
}

/// Takes apart projections that have q, k, v, z, and b, a by key head. With `r = v_heads / k_heads`:
///
/// | arg      | shape                            | dtype                | layout                                     |
/// |----------|----------------------------------|----------------------|--------------------------------------------|
/// | `qkvz`   | `[T, k_heads (2K + 2rV)]`        | `bf16`, `f16`, `f32` | rows of any stride; by key head `q, k, v, z` |
/// | `ba`     | `[T, k_heads 2r]`                | as `qkvz`            | rows of any stride; by key head `b, a`     |
/// | `qkv`    | `[T, 2 k_heads K + v_heads V]`   | as `qkvz`            | contiguous; all q, all k, all v            |
/// | `z`      | `[T, v_heads, V]`                | as `qkvz`            | contiguous                                 |
/// | `b`, `a` | `[T, v_heads]`                   | as `qkvz`            | contiguous                                 |
///
/// Bit for bit. The vectorized path needs `qkvz`, `qkv` and `z` with rows on 16 bytes, and `K` and `V` whole 16-byte vectors. No output may
/// share memory with another tensor. Returns when the launch is queued.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for sizes of zero or beyond 2^20, or heads that do not divide, [`Overlap`](Error::Overlap) if an output
/// shares memory with another tensor, [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is
/// written then.
pub fn fused_qkvzba_split<'a, T: Float>(
    stream: &Stream,
    qkvz: TensorView<'a, T>,
    ba: TensorView<'a, T>,
    outputs: SplitOutputs<'a, T>,
    sizes: HeadSizes,
) -> Result<()> {
    let SplitOutputs { mut qkv, mut z, mut b, mut a } = outputs;
    let shapes = split_shapes(qkvz.shape(), ba.shape(), sizes)?;
    for (arg, output, want) in
        [("qkv", &qkv, &shapes[0]), ("z", &z, &shapes[1]), ("b", &b, &shapes[2]), ("a", &a, &shapes[2])]
    {
        output.expect_shape(OP, arg, want)?;
        output.expect_contiguous(OP, arg)?;
        output.expect_aligned(OP, arg, size_of::<T>() as u64)?;
    }
    for (arg, input) in [("mixed_qkvz", &qkvz), ("mixed_ba", &ba)] {
        if input.shape()[1] > 1 {
            input.expect_unit_stride(OP, arg)?;
        }
        input.expect_aligned(OP, arg, size_of::<T>() as u64)?;
    }
    check_aliases(
        OP,
        &[("mixed_qkvz", Some(&qkvz)), ("mixed_ba", Some(&ba))],
        &[(("qkv", Some(&qkv)), &[]), (("z", Some(&z)), &[]), (("b", Some(&b)), &[]), (("a", Some(&a)), &[])],
    )?;
    let tokens = qkvz.shape()[0];
    if tokens == 0 {
        return Ok(());
    }
    let HeadSizes { k_heads, v_heads, k_dim, v_dim } = sizes;
    let element = size_of::<T>();
    let whole = |n: usize| (n * element).is_multiple_of(16);
    let vectorized =
        whole(k_dim) && whole(v_dim) && qkvz.rows_aligned(16) && qkv.is_aligned(16) && z.is_aligned(16);
    let piece = if vectorized { 16 / element } else { 1 };
    let kernel = stream.kernel(KERNELS[usize::from(element == 4)][usize::from(!vectorized)])?;
    let mut launch = stream.launch(OP);
    let params = Params {
        qkvz: launch.input_address("mixed_qkvz", &qkvz)?,
        ba: launch.input_address("mixed_ba", &ba)?,
        qkv: launch.output_address("qkv", &mut qkv)?,
        z: launch.output_address("z", &mut z)?,
        b: launch.output_address("b", &mut b)?,
        a: launch.output_address("a", &mut a)?,
        // Of one row it is not used, whatever it is.
        qkvz_row: (qkvz.strides()[0] / piece) as i64,
        ba_row: ba.strides()[0] as i64,
        pieces: (tokens * qkvz.shape()[1] / piece) as u64,
        gates: (tokens * ba.shape()[1]) as u64,
        k_heads: k_heads as u32,
        group: (v_heads / k_heads) as u32,
        k_dim: (k_dim / piece) as u32,
        v_dim: (v_dim / piece) as u32,
    };
    let blocks = (params.pieces + params.gates).div_ceil(THREADS) as usize;
    // SAFETY: the checks above make the tensors as long as these sizes say, in which the kernel stays on any grid.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(blocks), &params) }
}

/// The shapes of qkv, of z, and of b and a.
///
/// # Errors
/// [`Error::Shape`] and [`Error::Argument`].
pub(crate) fn split_shapes(qkvz: &[usize], ba: &[usize], sizes: HeadSizes) -> Result<[Vec<usize>; 3]> {
    let HeadSizes { k_heads, v_heads, k_dim, v_dim } = sizes;
    for (arg, n) in [("k_heads", k_heads), ("v_heads", v_heads), ("k_dim", k_dim), ("v_dim", v_dim)] {
        if n == 0 || n > 1 << 20 {
            return Err(Error::argument(OP, arg, n, "from 1 to 2^20"));
        }
    }
    if !v_heads.is_multiple_of(k_heads) {
        return Err(Error::argument(OP, "v_heads", v_heads, format!("a multiple of {k_heads} (k_heads)")));
    }
    let (keys, values) = (k_heads * k_dim, v_heads * v_dim);
    if keys > 1 << 28 || values > 1 << 28 {
        return Err(Error::argument(OP, "k_heads", k_heads, "heads of 2^28 elements together"));
    }
    let &[tokens, columns] = qkvz else {
        return Err(Error::shape(OP, "mixed_qkvz", qkvz, "2 axes: [T, columns]"));
    };
    let want = 2 * keys + 2 * values;
    if columns != want {
        return Err(Error::shape(
            OP,
            "mixed_qkvz",
            qkvz,
            format!("[{tokens}, {want}] (heads of q, k, v, z)"),
        ));
    }
    if ba != [tokens, 2 * v_heads] {
        return Err(Error::shape(OP, "mixed_ba", ba, format!("[{tokens}, {}] (heads of b, a)", 2 * v_heads)));
    }
    Ok([vec![tokens, 2 * keys + values], vec![tokens, v_heads, v_dim], vec![tokens, v_heads]])
}
