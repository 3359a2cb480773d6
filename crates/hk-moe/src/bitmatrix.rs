//! The safe function of `hip/bitmatrix.hip`.

use crate::args::{MOST_EXPERTS, MOST_GATES, Vector};
use crate::kernels::bitmatrix::Params;
use hk_core::{Error, KernelRef, LaunchConfig, Result, Stream, TensorView, TensorViewMut, check_aliases};

static SUM: KernelRef<Params> = Params::kernel("bitmatrix_sum");

/// Tokens of a word's worth of bits, and experts of a word.
const STEP: usize = 32;

/// How many tokens have each expert, from the bits of [`moe_topk`](crate::moe_topk), and how many before each part of the tokens.
///
/// | arg         | shape                               | dtype | layout                                              |
/// |-------------|-------------------------------------|-------|-----------------------------------------------------|
/// | `bitmatrix` | `[words, rows]`                     | `i32` | contiguous; bit `b` of `[w, t]` is of expert `32 w + b` |
/// | `hist`      | `[32 words]`                        | `i32` | contiguous                                          |
/// | `partials`  | `[ceil(tokens / part), 32 words]`   | `i32` | contiguous                                          |
///
/// `hist[e]` counts the bits of expert `e` over `tokens` tokens, `partials[p, e]` those of the tokens before `part p`. Bits of rows from
/// `tokens` on are ignored. Both are written whole.
///
/// One launch. No output may alias another tensor. Returns when it is queued. No words: nothing is launched.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Align`](Error::Align) if a tensor breaks the table,
/// [`Argument`](Error::Argument) for more tokens than rows, more than 32 words, or a `part` that is not a multiple of 32,
/// [`TooLarge`](Error::TooLarge) beyond 2^30 tokens, [`Overlap`](Error::Overlap) if an output shares memory with another tensor,
/// [`DeviceMismatch`](Error::DeviceMismatch), and the errors of loading and launching a kernel. Nothing is written then.
pub fn moe_bitmatrix(
    stream: &Stream,
    bitmatrix: TensorView<i32>,
    hist: TensorViewMut<i32>,
    partials: TensorViewMut<i32>,
    tokens: usize,
    part: usize,
) -> Result<()> {
    const OP: &str = "moe_bitmatrix";
    let (mut hist, mut partials) = (hist, partials);
    let [words, rows] = bitmatrix.dims(OP, "bitmatrix")?;
    if words > MOST_EXPERTS / STEP {
        let want = format!("at most {}", MOST_EXPERTS / STEP);
        return Err(Error::argument(OP, "bitmatrix", format!("{words} words"), want));
    }
    if tokens > rows {
        return Err(Error::argument(OP, "tokens", tokens, format!("at most {rows} (rows of bitmatrix)")));
    }
    if tokens > MOST_GATES {
        return Err(Error::too_large(OP, "bitmatrix", format!("{tokens} tokens"), MOST_GATES as u64));
    }
    if part == 0 || !part.is_multiple_of(STEP) {
        return Err(Error::argument(OP, "part", part, "a multiple of 32"));
    }
    bitmatrix.expect_packed(OP, "bitmatrix")?;
    hist.expect_vector(OP, "hist", words * STEP, "bits of words")?;
    partials.expect_shape(OP, "partials", [tokens.div_ceil(part), words * STEP])?;
    partials.expect_packed(OP, "partials")?;
    check_aliases(
        OP,
        &[("bitmatrix", Some(&bitmatrix))],
        &[(("hist", Some(&hist)), &[]), (("partials", Some(&partials)), &[])],
    )?;
    if words == 0 {
        return Ok(());
    }
    let kernel = stream.kernel(SUM)?;
    let mut launch = stream.launch(OP);
    let params = Params {
        bits: launch.input_address("bitmatrix", &bitmatrix)?,
        counts: launch.output_address("hist", &mut hist)?,
        partials: launch.output_address("partials", &mut partials)?,
        tokens: tokens as u32,
        rows: u32::try_from(rows)
            .map_err(|_| Error::too_large(OP, "bitmatrix", format!("{rows} rows"), u64::from(u32::MAX)))?,
        words: words as u32,
        // No more steps than there are tokens: a longer part is the only one.
        per_part: (part / STEP).min(MOST_GATES) as u32,
    };
    // SAFETY: the checks above make the bits `words` by `rows`, of which `tokens` are read, and the outputs as large as they count.
    unsafe { launch.run(&kernel, LaunchConfig::grid_1d(words), &params) }
}
