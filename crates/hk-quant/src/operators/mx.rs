//! `dynamic_mxfp4_quant` and the order of its scales.

use super::X;
use super::group::{as_rows, turned};
use crate::{MxOptions, kernels, reference};
use hk_core::quant::{BlockRule, BlockScale, ScaleLayout, shuffled_len};
use hk_core::registry::{
    ArgSpec, BenchSizes, Call, CallSpec, Case, Described, DeviceCall, HostCall, HostTensorF64, Named,
    Operator, Sample, Scalar, ScalarSpec, TensorSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Fp4Rounding, Result, Stream, with_float};

pub(crate) const DYNAMIC_MXFP4_QUANT: Operator = Operator {
    name: "dynamic_mxfp4_quant",
    family: "hk-quant",
    summary: "scale = 2^e per block of 32 columns, q = round(x / scale) in fp4",
    args: &[
        X,
        ArgSpec::output("q", Tolerance::Exact, &[DType::Fp4x2], 2, "[.., cols / 2]").ranks(1, 5),
        ArgSpec::output(
            "scale",
            Tolerance::Exact,
            &[DType::E8M0],
            2,
            "[rows, blocks], [blocks, rows] or [n]",
        )
        .ranks(1, 2),
    ],
    scalars: &[
        MODE,
        ScalarSpec {
            name: "scale_layout",
            default: Scalar::Choice("row_major"),
            choices: &["row_major", "col_major", "shuffled950"],
            summary: "layout of the scales",
        },
    ],
    kernels: &[&kernels::MX_QUANT],
    cases: &[
        Case { label: "Llama-3 8B, 128 tokens", tensors: &[("x", DType::Bf16, &[128, 4096])], scalars: &[] },
        Case {
            label: "DeepSeek-V3, 64 tokens, shuffled",
            tensors: &[("x", DType::Bf16, &[64, 7168])],
            scalars: &[("scale_layout", Scalar::Choice("shuffled950"))],
        },
    ],
    bench: BenchSizes::rows(&[[4096, 7168], [61_440, 8192]], &["x"], &[]),
    corners: CORNERS,
    outputs,
    run,
    reference: reference_mx,
    traffic: Traffic::once,
};

pub(crate) const SHUFFLE_SCALES: Operator = Operator {
    name: "shuffle_scales",
    family: "hk-quant",
    summary: "block scales to the order of gfx950's matrix instructions",
    args: &[
        ArgSpec::input("plain", &[DType::E8M0], 2, "[rows, blocks]").sampled(SCALES),
        ArgSpec::output("shuffled", Tolerance::Exact, &[DType::E8M0], 1, "[n]"),
    ],
    scalars: &[],
    kernels: &[&kernels::SCALES],
    cases: &[Case {
        label: "DeepSeek-V3, 512 tokens",
        tensors: &[("plain", DType::E8M0, &[512, 224])],
        scalars: &[],
    }],
    bench: BenchSizes::Cases(&[Case {
        label: "1048576 x 512",
        tensors: &[("plain", DType::E8M0, &[1_048_576, 512])],
        scalars: &[],
    }]),
    corners: &[
        Case { label: "300 rows of 9", tensors: &[("plain", DType::E8M0, &[300, 9])], scalars: &[] },
        Case { label: "1 row of 1", tensors: &[("plain", DType::E8M0, &[1, 1])], scalars: &[] },
        Case { label: "300 rows of 16", tensors: &[("plain", DType::E8M0, &[300, 16])], scalars: &[] },
        Case { label: "70 rows of 304", tensors: &[("plain", DType::E8M0, &[70, 304])], scalars: &[] },
    ],
    outputs: |call| {
        let [rows, blocks] = plain_shape(call.get("plain")?)?;
        let n = shuffled_len(rows, blocks).unwrap_or(usize::MAX);
        Ok(vec![("shuffled", TensorSpec::new(DType::E8M0, [n]))])
    },
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        crate::shuffle_scales(stream, inputs.view("plain")?, outputs.take("shuffled")?)
    },
    reference: |call| {
        let plain = call.get("plain")?;
        let [rows, blocks] = plain_shape(&plain.spec())?;
        let values = reference::shuffle_scales(&plain.to_f64(), rows, blocks);
        Ok(vec![("shuffled", HostTensorF64::new([values.len()], values))])
    },
    traffic: Traffic::once,
};

pub(crate) const UNSHUFFLE_SCALES: Operator = Operator {
    name: "unshuffle_scales",
    family: "hk-quant",
    summary: "block scales from the order of gfx950's matrix instructions",
    args: &[
        ArgSpec::input("shuffled", &[DType::E8M0], 1, "[n]").sampled(SCALES),
        ArgSpec::output("plain", Tolerance::Exact, &[DType::E8M0], 2, "[rows, blocks]"),
    ],
    scalars: &[
        ScalarSpec { name: "rows", default: Scalar::Count(256), choices: &[], summary: "rows" },
        ScalarSpec { name: "blocks", default: Scalar::Count(8), choices: &[], summary: "blocks per row" },
    ],
    kernels: &[&kernels::SCALES],
    cases: &[Case {
        label: "DeepSeek-V3, 512 tokens",
        tensors: &[("shuffled", DType::E8M0, &[512 * 224])],
        scalars: &[("rows", Scalar::Int(512)), ("blocks", Scalar::Int(224))],
    }],
    bench: BenchSizes::Cases(&[Case {
        label: "1048576 x 512",
        tensors: &[("shuffled", DType::E8M0, &[1 << 29])],
        scalars: &[("rows", Scalar::Int(1_048_576)), ("blocks", Scalar::Int(512))],
    }]),
    corners: &[
        Case {
            label: "300 rows of 9",
            tensors: &[("shuffled", DType::E8M0, &[512 * 16])],
            scalars: &[("rows", Scalar::Int(300)), ("blocks", Scalar::Int(9))],
        },
        Case {
            label: "300 rows of 48",
            tensors: &[("shuffled", DType::E8M0, &[512 * 48])],
            scalars: &[("rows", Scalar::Int(300)), ("blocks", Scalar::Int(48))],
        },
    ],
    outputs: |call| {
        call.get("shuffled")?;
        Ok(vec![("plain", TensorSpec::new(DType::E8M0, given_shape(call)?))])
    },
    run: |stream, call| {
        let (inputs, mut outputs) = call.split();
        crate::unshuffle_scales(stream, inputs.view("shuffled")?, outputs.take("plain")?)
    },
    reference: |call| {
        let [rows, blocks] = given_shape(call)?;
        let values = reference::unshuffle_scales(&call.get("shuffled")?.to_f64(), rows, blocks);
        Ok(vec![("plain", HostTensorF64::new([rows, blocks], values))])
    },
    traffic: Traffic::once,
};

/// Powers of two.
const SCALES: Sample = Sample::Uniform { low: 0.001, high: 1000.0 };

tile_corners!(CORNERS, []:
    Bf16 [],
    F16 [("mode", Scalar::Choice("round_up")), ("scale_layout", Scalar::Choice("shuffled950"))],
    F32 [("mode", Scalar::Choice("floor")), ("scale_layout", Scalar::Choice("col_major"))]);

fn plain_shape(plain: &TensorSpec) -> Result<[usize; 2]> {
    let shape = plain.shape.as_slice();
    shape.try_into().map_err(|_| Error::shape("shuffle_scales", "plain", shape, "[rows, blocks]"))
}

fn given_shape<V: Described>(call: &Call<V>) -> Result<[usize; 2]> {
    Ok([call.size("rows")?, call.size("blocks")?])
}

pub(crate) const MODE: ScalarSpec = ScalarSpec {
    name: "mode",
    default: Scalar::Choice("even"),
    choices: &["even", "round_up", "floor"],
    summary: "rule of the scale from the largest magnitude",
};

/// The value of [`MODE`].
pub(crate) fn mode<V: Described>(call: &Call<V>) -> Result<BlockScale> {
    Ok(match call.choice("mode")? {
        "round_up" => BlockScale::RoundUp,
        "floor" => BlockScale::Floor,
        _ => BlockScale::Even,
    })
}

fn options<V: Described>(call: &Call<V>) -> Result<MxOptions> {
    let scale_layout = match call.choice("scale_layout")? {
        "col_major" => ScaleLayout::ColMajor,
        "shuffled950" => ScaleLayout::Shuffled950,
        _ => ScaleLayout::RowMajor,
    };
    Ok(MxOptions { mode: mode(call)?, scale_layout })
}

/// Rows, columns and blocks per row.
fn sizes(x: &TensorSpec) -> (usize, usize, usize) {
    let cols = x.shape.last().copied().unwrap_or(1);
    (x.shape.iter().rev().skip(1).product(), cols, cols.div_ceil(32))
}

fn outputs(call: &CallSpec) -> Result<Named<TensorSpec>> {
    let x = call.get("x")?;
    let (rows, _, blocks) = sizes(x);
    let mut shape = x.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last /= 2;
    }
    let scale = match options(call)?.scale_layout {
        ScaleLayout::RowMajor => vec![rows, blocks],
        ScaleLayout::ColMajor => vec![blocks, rows],
        ScaleLayout::Shuffled950 => vec![shuffled_len(rows, blocks).unwrap_or(usize::MAX)],
    };
    Ok(vec![("q", TensorSpec::new(DType::Fp4x2, shape)), ("scale", TensorSpec::new(DType::E8M0, scale))])
}

fn run(stream: &Stream, call: &mut DeviceCall) -> Result<()> {
    let (inputs, mut outputs) = call.split();
    let options = options(&inputs)?;
    let scale = as_rows(outputs.take("scale")?, options.scale_layout == ScaleLayout::ColMajor)?;
    with_float!("dynamic_mxfp4_quant", "x", inputs.get("x")?.dtype(), T => {
        crate::dynamic_mxfp4_quant(stream, inputs.view::<T>("x")?, outputs.take("q")?, scale, options)
    })
}

fn reference_mx(call: &HostCall) -> Result<Named<HostTensorF64>> {
    let x = call.get("x")?;
    let options = options(call)?;
    let (rows, cols, blocks) = sizes(&x.spec());
    let rule = BlockRule::fp4(options.mode, 0);
    let out = reference::mx_quant(&x.to_f64(), cols, rule, reference::fp4(Fp4Rounding::NearestEven));
    let scale = match options.scale_layout {
        ScaleLayout::Shuffled950 => {
            let values = reference::shuffle_scales(&out.scale, rows, blocks);
            HostTensorF64::new([values.len()], values)
        }
        layout => turned(out.scale, rows, layout == ScaleLayout::ColMajor),
    };
    Ok(vec![("q", HostTensorF64::new(x.shape(), out.q)), ("scale", scale)])
}
