//! Weights in the order in which matrix instructions take them.

use crate::gemm::operands::check_shuffled;
use crate::gemm::params::{CHUNK, SHUFFLED_ROWS};
use crate::kernels::shuffle::Params;
use hk_core::{
    Element, Error, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut, check_aliases,
};

/// Writes weights in the order of [`GemmWeight::Shuffled`](crate::GemmWeight::Shuffled).
///
/// | arg        | shape                    | dtype | layout                          |
/// |------------|--------------------------|-------|---------------------------------|
/// | `plain`    | `[N, K]`, `[batch, N, K]` | any   | unit stride on `K`, others free |
/// | `shuffled` | `[.., N, K']`, `K' >= K` | as it | contiguous, 16-byte aligned     |
///
/// `N` is a multiple of 16, `K'` of 32 elements (bytes, for fp4); columns from `K` on become zero.
///
/// # Errors
/// [`Shape`](hk_core::Error::Shape), [`Stride`](hk_core::Error::Stride), [`Align`](hk_core::Error::Align) if a tensor breaks the table,
/// [`Overlap`](hk_core::Error::Overlap) if they share memory, [`TooLarge`](hk_core::Error::TooLarge) for rows beyond 2^31 bytes,
/// [`DeviceMismatch`](hk_core::Error::DeviceMismatch), and what loading and launching a kernel can answer.
pub fn shuffle_weight<T: Element>(
    stream: &Stream,
    plain: TensorView<T>,
    mut shuffled: TensorViewMut<T>,
) -> Result<()> {
    const OP: &str = "shuffle_weight";
    plain.expect_unit_stride(OP, "plain")?;
    plain.expect_aligned(OP, "plain", size_of::<T>() as u64)?;
    let params = params::<T>(OP, plain.shape(), plain.strides(), shuffled.shape(), false)?;
    shuffled.expect_contiguous(OP, "shuffled")?;
    shuffled.expect_aligned(OP, "shuffled", CHUNK as u64)?;
    check_aliases(OP, &[("plain", Some(&plain))], &[(("shuffled", Some(&shuffled)), &[])])?;
    if params.all == 0 {
        return Ok(());
    }
    let kernel = stream.kernel(kernel(plain.rows_aligned(CHUNK as u64), &params))?;
    let mut launch = stream.launch(OP);
    let plain = launch.input("plain", &plain)?.data();
    let params = Params { plain, shuffled: launch.output("shuffled", &mut shuffled)?.data(), ..params };
    // SAFETY: the checks give both tensors the bytes of `all` chunks, which the kernel accesses whatever the grid.
    unsafe { launch.run(&kernel, grid(stream, &params), &params) }
}

/// The inverse of [`shuffle_weight`]: the same arguments and errors, `shuffled` read and `plain` written.
///
/// # Errors
/// As [`shuffle_weight`].
pub fn unshuffle_weight<T: Element>(
    stream: &Stream,
    shuffled: TensorView<T>,
    mut plain: TensorViewMut<T>,
) -> Result<()> {
    const OP: &str = "unshuffle_weight";
    plain.expect_unit_stride(OP, "plain")?;
    plain.expect_aligned(OP, "plain", size_of::<T>() as u64)?;
    let params = params::<T>(OP, plain.shape(), plain.strides(), shuffled.shape(), true)?;
    shuffled.expect_contiguous(OP, "shuffled")?;
    shuffled.expect_aligned(OP, "shuffled", CHUNK as u64)?;
    check_aliases(OP, &[("shuffled", Some(&shuffled))], &[(("plain", Some(&plain)), &[])])?;
    if params.all == 0 {
        return Ok(());
    }
    let kernel = stream.kernel(kernel(plain.rows_aligned(CHUNK as u64), &params))?;
    let mut launch = stream.launch(OP);
    let shuffled = launch.input("shuffled", &shuffled)?.data();
    let params = Params { shuffled, plain: launch.output("plain", &mut plain)?.data(), ..params };
    // SAFETY: as in `shuffle_weight`.
    unsafe { launch.run(&kernel, grid(stream, &params), &params) }
}

fn kernel(aligned: bool, params: &Params) -> KernelRef<Params> {
    if aligned && params.bytes.is_multiple_of(CHUNK as u32) {
        const { Params::kernel("weights_shuffle") }
    } else {
        const { Params::kernel("weights_shuffle_scalar") }
    }
}

fn grid(stream: &Stream, params: &Params) -> LaunchConfig {
    const THREADS: u64 = 256;
    const BLOCKS_PER_CU: usize = 8;
    let most = stream.device().info().compute_units as usize * BLOCKS_PER_CU;
    LaunchConfig::grid_1d((params.all.div_ceil(THREADS) as usize).min(most))
}

fn params<T: Element>(
    op: &'static str,
    plain: &[usize],
    strides: &[usize],
    shuffled: &[usize],
    back: bool,
) -> Result<Params> {
    check_shuffled(op, "shuffled", shuffled)?;
    let last = shuffled.len() - 1;
    let fits =
        plain.len() == shuffled.len() && plain[..last] == shuffled[..last] && plain[last] <= shuffled[last];
    if !fits {
        let want = format!("{:?}, the last axis no longer than that", shuffled);
        return Err(Error::shape(op, "plain", plain, want));
    }
    let (rows, bytes) = (shuffled[last - 1], shuffled[last].saturating_mul(size_of::<T>()));
    if bytes >= 1 << 31 || rows >= 1 << 31 {
        return Err(Error::too_large(op, "shuffled", format!("{shuffled:?}"), (1 << 31) - 1));
    }
    let batch = if last == 2 { shuffled[0] } else { 1 };
    let byte = |axis: usize| if plain[axis] > 1 { (strides[axis] * size_of::<T>()) as i64 } else { 0 };
    Ok(Params {
        plain: 0,
        shuffled: 0,
        batch: if last == 2 { byte(0) } else { 0 },
        row: byte(last - 1),
        chunks: (bytes / CHUNK) as u32,
        rows: rows as u32,
        all: (batch * rows * (bytes / CHUNK)) as u64,
        bytes: (plain[last] * size_of::<T>()) as u32,
        back: back.into(),
    })
}

/// [`shuffle_weight`] on the host: of `[rows, columns]`, row by row.
///
/// # Panics
/// If `rows` is no multiple of 16, `columns` none of 32, or `plain` shorter.
pub fn shuffle_weight_host<T: Copy>(plain: &[T], [rows, columns]: [usize; 2]) -> Vec<T> {
    shuffled_order::<T>([rows, columns]).map(|at| plain[at]).collect()
}

/// The inverse of [`shuffle_weight_host`].
///
/// # Panics
/// As [`shuffle_weight_host`].
pub fn unshuffle_weight_host<T: Copy>(shuffled: &[T], [rows, columns]: [usize; 2]) -> Vec<T> {
    let mut plain = shuffled[..rows * columns].to_vec();
    for (at, &element) in shuffled_order::<T>([rows, columns]).zip(shuffled) {
        plain[at] = element;
    }
    plain
}

/// Where the elements of shuffled weights are in plain ones.
fn shuffled_order<T>([rows, columns]: [usize; 2]) -> impl Iterator<Item = usize> {
    assert!(rows.is_multiple_of(SHUFFLED_ROWS) && columns.is_multiple_of(32), "{rows} x {columns}");
    let chunk = CHUNK / size_of::<T>();
    let block = SHUFFLED_ROWS * columns;
    (0..rows * columns).map(move |i| {
        let row = i / block * SHUFFLED_ROWS + i / chunk % SHUFFLED_ROWS;
        row * columns + i % block / (SHUFFLED_ROWS * chunk) * chunk + i % chunk
    })
}
