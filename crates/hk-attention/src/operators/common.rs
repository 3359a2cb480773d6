//! Arguments, scalars and checks that the registry entries share.

use crate::KvLayout;
use crate::reference::Tokens;
use hk_core::plan::rope::{Positions, Rope, RopeDirection, RopeSpan, RopeStyle, RopeTableWidth, RopeTables};
use hk_core::registry::{
    ArgSpec, Call, Described, HostCall, HostTensor, Inputs, Sample, Scalar, ScalarSpec, Tolerance, Traffic,
};
use hk_core::{DType, Error, Float, Fp8E4M3, Fp8E4M3Fnuz, IndexView, Result, bf16, f16};

pub(super) const ACTIVATIONS: &[DType] = &[DType::Bf16, DType::F16];
pub(super) const TABLES: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
pub(super) const NARROW: &[DType] = &[DType::Bf16, DType::F16, DType::Fp8E4M3Fnuz, DType::Fp8E4M3];
/// Types of caches beside that of the heads.
pub(super) const FP8: &[DType] = &[DType::Fp8E4M3Fnuz, DType::Fp8E4M3];
pub(super) const INDICES: &[DType] = &[DType::I32, DType::I64];
pub(super) const INDICES_32: &[DType] = &[DType::I32];

/// Rows of the tables in the cases.
pub(super) const TABLE_ROWS: usize = 64;

pub(super) const COS: ArgSpec = ArgSpec::input("cos", TABLES, 2, "[positions, rotary / 2 or rotary]")
    .sampled(Sample::Uniform { low: -1.0, high: 1.0 });
pub(super) const SIN: ArgSpec = ArgSpec { name: "sin", ..COS };
/// Positions within the tables of the cases, except one in 65.
pub(super) const POSITIONS: ArgSpec = ArgSpec::input("positions", INDICES, 1, "[tokens]")
    .sampled(Sample::Integers { low: 0, high: TABLE_ROWS as i64 + 1 });
pub(super) const OFFSETS: ArgSpec = ArgSpec::input("offsets", INDICES, 1, "[tokens]")
    .sampled(Sample::Integers { low: -4, high: 5 })
    .optional();
/// Consecutive slots, as for a prompt.
pub(super) const SLOT_MAPPING: ArgSpec =
    ArgSpec::input("slot_mapping", INDICES, 1, "[n]").sampled(Sample::Steps { step: 1 });
pub(super) const K_SCALE: ArgSpec = ArgSpec::input("k_scale", &[DType::F32], 1, "[1]")
    .sampled(Sample::Uniform { low: 0.005, high: 0.02 })
    .optional();
pub(super) const V_SCALE: ArgSpec = ArgSpec { name: "v_scale", ..K_SCALE };

/// A cache holds the rounded values of the same arithmetic; in fp8 a value may lie on either side of a tie.
pub(super) const CACHED: Tolerance = Tolerance::Neighbour;

pub(super) const STYLE: ScalarSpec = ScalarSpec {
    name: "style",
    default: Scalar::Choice("neox"),
    choices: &["neox", "interleaved"],
    summary: "pairs of columns: (i, i + rotary / 2), or (2i, 2i + 1)",
};
pub(super) const TABLE: ScalarSpec = ScalarSpec {
    name: "table",
    default: Scalar::Choice("half"),
    choices: &["half", "full"],
    summary: "tables with an entry for each pair, or for each column",
};
pub(super) const SPAN: ScalarSpec = ScalarSpec {
    name: "span",
    default: Scalar::Choice("first"),
    choices: &["first", "last"],
    summary: "the columns of a head that are rotated, if not all are",
};

pub(super) const LAYOUT: ScalarSpec = ScalarSpec {
    name: "layout",
    default: Scalar::Choice("nhd"),
    choices: &["nhd", "hnd", "paged", "paged_shuffled"],
    summary: "memory layout of the caches",
};

pub(super) fn layout<V: Described>(call: &Call<V>) -> Result<KvLayout> {
    Ok(match call.choice("layout")? {
        "hnd" => KvLayout::Hnd,
        "paged" => KvLayout::Paged,
        "paged_shuffled" => KvLayout::PagedShuffled,
        _ => KvLayout::Nhd,
    })
}

/// Runs `$body` with `$t` as the type of activations.
macro_rules! with_activation {
    ($op:expr, $arg:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            hk_core::DType::Bf16 => {
                type $t = hk_core::bf16;
                $body
            }
            hk_core::DType::F16 => {
                type $t = hk_core::f16;
                $body
            }
            other => Err(hk_core::Error::dtype($op, $arg, other, "bf16, f16")),
        }
    };
}
pub(super) use with_activation;

/// Runs `$body` with `$c` as the type of a cache beside activations of type `$t`.
macro_rules! with_narrow {
    ($dtype:expr, $t:ty, $c:ident => $body:expr) => {
        match $dtype {
            hk_core::DType::Fp8E4M3Fnuz => {
                type $c = hk_core::Fp8E4M3Fnuz;
                $body
            }
            hk_core::DType::Fp8E4M3 => {
                type $c = hk_core::Fp8E4M3;
                $body
            }
            _ => {
                type $c = $t;
                $body
            }
        }
    };
}
pub(super) use with_narrow;

/// Runs `$body` with `$r` as the type of tables beside activations of type `$t`.
macro_rules! with_table {
    ($dtype:expr, $t:ty, $r:ident => $body:expr) => {
        if $dtype == hk_core::DType::F32 {
            type $r = f32;
            $body
        } else {
            type $r = $t;
            $body
        }
    };
}
pub(super) use with_table;

pub(super) fn rope_style<V: Described>(call: &Call<V>) -> Result<RopeStyle> {
    Ok(match call.choice("style")? {
        "interleaved" => RopeStyle::Interleaved,
        _ => RopeStyle::Neox,
    })
}

/// The rotation of the first columns by tables with an entry for each pair.
pub(super) fn rope_of_pairs(style: RopeStyle, rotary: usize) -> Rope {
    Rope {
        style,
        table: RopeTableWidth::Half,
        rotary,
        span: RopeSpan::First,
        direction: RopeDirection::Forward,
    }
}

/// The rotation of the first columns, its width that of the tables.
pub(super) fn rope_first<V: Described>(call: &Call<V>) -> Result<Rope> {
    let width = call.get("cos")?.shape()[1];
    let (table, rotary) = match call.choice("table")? {
        "full" => (RopeTableWidth::Full, width),
        _ => (RopeTableWidth::Half, 2 * width),
    };
    Ok(Rope {
        style: rope_style(call)?,
        table,
        rotary,
        span: RopeSpan::First,
        direction: RopeDirection::Forward,
    })
}

/// The rotation of the first or the last columns.
pub(super) fn rope<V: Described>(call: &Call<V>) -> Result<Rope> {
    let span = match call.choice("span")? {
        "last" => RopeSpan::Last,
        _ => RopeSpan::First,
    };
    Ok(Rope { span, ..rope_first(call)? })
}

fn index<'a>(inputs: &Inputs<'a>, name: &'static str) -> Result<Option<IndexView<'a>>> {
    match inputs.optional(name).map(Described::dtype) {
        None => Ok(None),
        Some(DType::I64) => Ok(inputs.optional_view::<i64>(name)?.map(IndexView::from)),
        Some(_) => Ok(inputs.optional_view::<i32>(name)?.map(IndexView::from)),
    }
}

pub(super) fn slots<'a>(inputs: &Inputs<'a>) -> Result<IndexView<'a>> {
    match inputs.get("slot_mapping")?.dtype() {
        DType::I64 => Ok(inputs.view::<i64>("slot_mapping")?.into()),
        _ => Ok(inputs.view::<i32>("slot_mapping")?.into()),
    }
}

pub(super) fn tables<'a, R: hk_core::Element>(inputs: &Inputs<'a>) -> Result<RopeTables<'a, R>> {
    let positions = match (index(inputs, "positions")?, index(inputs, "cu_seqlens")?) {
        (None, None) => Positions::Index,
        (Some(given), None) => Positions::Given(given),
        (None, Some(starts)) => Positions::Sequences(starts),
        (Some(_), Some(_)) => {
            let op = inputs.operator().name;
            return Err(Error::argument(op, "cu_seqlens", "given", "nothing beside positions"));
        }
    };
    let offsets = index(inputs, "offsets")?;
    Ok(RopeTables { cos: inputs.view("cos")?, sin: inputs.view("sin")?, positions, offsets })
}

/// The tokens of a call, on the host.
pub(super) struct HostTokens {
    rope: Rope,
    cos: Vec<f64>,
    sin: Vec<f64>,
    positions: Vec<i64>,
    slots: Vec<i64>,
}

pub(super) fn integers(tensor: &HostTensor) -> Vec<i64> {
    tensor.to_f64().iter().map(|&v| v as i64).collect()
}

impl HostTokens {
    pub fn of(call: &HostCall) -> Result<Self> {
        let mut positions = integers(call.get("positions")?);
        if let Some(offsets) = call.optional("offsets") {
            positions.iter_mut().zip(integers(offsets)).for_each(|(p, o)| *p = p.saturating_add(o));
        }
        Ok(Self {
            rope: rope(call)?,
            cos: call.get("cos")?.to_f64(),
            sin: call.get("sin")?.to_f64(),
            positions,
            slots: integers(call.get("slot_mapping")?),
        })
    }

    pub fn tokens(&self, n_slots: usize) -> Tokens<'_> {
        let Self { rope, cos, sin, positions, slots } = self;
        Tokens { rope: *rope, cos, sin, positions, slots, n_slots }
    }

    pub fn cached(&self) -> usize {
        self.slots.len()
    }
}

/// The reciprocal of a scale, as the kernels have it.
pub(super) fn reciprocal(call: &HostCall, name: &str) -> f64 {
    call.optional(name).map_or(1.0, |t| f64::from(1.0 / (t.to_f64()[0] as f32)))
}

/// A value rounded to a type of activations.
pub(super) fn rounded(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::Bf16 => <bf16 as Float>::from_f64(x).to_f64(),
        DType::F16 => <f16 as Float>::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    }
}

/// A value as a tensor of this type stores it: fp8 saturates.
pub(super) fn stored(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::Fp8E4M3 => Fp8E4M3::from_f32_saturating(x as f32).to_f32().into(),
        DType::Fp8E4M3Fnuz => Fp8E4M3Fnuz::from_f32_saturating(x as f32).to_f32().into(),
        _ => x,
    }
}

/// Checks that a tensor has at most as many axes as its specification says, for shapes that are only checked in part here.
pub(super) fn shape<const N: usize, V: Described>(call: &Call<V>, name: &'static str) -> Result<[usize; N]> {
    let shape = call.get(name)?.shape();
    shape.try_into().map_err(|_| Error::shape(call.operator().name, name, shape, format!("{N} axes")))
}

/// Checks that tensors are of the type of the first.
pub(super) fn expect_dtypes<V: Described>(
    call: &Call<V>,
    first: &'static str,
    others: &[&'static str],
) -> Result<()> {
    let want = call.get(first)?.dtype();
    for &name in others {
        let got = call.get(name)?.dtype();
        if got != want {
            return Err(Error::dtype(call.operator().name, name, got, format!("{want} (dtype of {first})")));
        }
    }
    Ok(())
}

/// Checks that a tensor, if it is given, is of the type of the heads `first` or one of the others.
pub(super) fn expect_dtype_of<V: Described>(
    call: &Call<V>,
    name: &'static str,
    first: &'static str,
    others: &[DType],
) -> Result<()> {
    let want = call.get(first)?.dtype();
    match call.optional(name).map(V::dtype).filter(|got| *got != want && !others.contains(got)) {
        Some(got) => Err(Error::dtype(call.operator().name, name, got, want)),
        None => Ok(()),
    }
}

/// Checks the tables against the rotation, and positions and offsets against the tokens.
pub(super) fn expect_tables<V: Described>(
    call: &Call<V>,
    rope: &Rope,
    tokens: usize,
    heads: &'static str,
) -> Result<()> {
    expect_dtype_of(call, "cos", heads, &[DType::F32])?;
    let (op, width) = (call.operator().name, rope.table_width());
    let cos = call.get("cos")?.shape();
    if cos[1] != width {
        return Err(Error::shape(op, "cos", cos, format!("[{}, {width}] (columns: rotary)", cos[0])));
    }
    let sin = call.get("sin")?.shape();
    if sin != cos {
        return Err(Error::shape(op, "sin", sin, format!("{cos:?} (shape of cos)")));
    }
    expect_dtypes(call, "cos", &["sin"])?;
    for name in ["positions", "offsets"] {
        let shape = call.optional(name).map(V::shape);
        if let Some(shape) = shape.filter(|shape| *shape != [tokens]) {
            return Err(Error::shape(op, name, shape, format!("[{tokens}] (the tokens)")));
        }
    }
    match call.optional("cu_seqlens").map(V::shape) {
        Some(_) if call.optional("positions").is_some() => {
            Err(Error::argument(op, "cu_seqlens", "given", "nothing beside positions"))
        }
        Some(shape @ [0]) => Err(Error::shape(op, "cu_seqlens", shape, "[sequences + 1]")),
        _ => Ok(()),
    }
}

/// Checks the slots: `[n]`, from the rotated tokens to all of them.
pub(super) fn expect_slots<V: Described>(call: &Call<V>, rotated: usize, all: usize) -> Result<()> {
    let shape = call.get("slot_mapping")?.shape();
    if (rotated..=all).contains(&shape[0]) {
        return Ok(());
    }
    let want = format!("[n] with n from {rotated} (tokens of q) to {all} (tokens of k)");
    Err(Error::shape(call.operator().name, "slot_mapping", shape, want))
}

/// Checks the shape of a tensor, if it is given.
pub(super) fn expect_shape<V: Described>(
    call: &Call<V>,
    name: &'static str,
    want: &[usize],
    why: &str,
) -> Result<()> {
    match call.optional(name).map(V::shape).filter(|shape| *shape != want) {
        Some(shape) => Err(Error::shape(call.operator().name, name, shape, format!("{want:?} ({why})"))),
        None => Ok(()),
    }
}

/// Checks that a scale, if it is given, is a single number.
pub(super) fn expect_scale<V: Described>(call: &Call<V>, name: &'static str) -> Result<()> {
    match call.optional(name).map(V::shape).filter(|shape| shape.iter().product::<usize>() != 1) {
        Some(shape) => Err(Error::shape(call.operator().name, name, shape, "[1]")),
        None => Ok(()),
    }
}

/// The bytes that a call has to move: table rows of the positions; cache slots that are written, but not their old contents; of
/// `values`, an input that only goes to the cache, the tokens with a slot.
pub(super) fn traffic(
    call: &HostCall,
    caches: &[&'static str],
    n_slots: usize,
    values: &'static str,
) -> Traffic {
    let Ok(host) = HostTokens::of(call) else { return Traffic::once(call) };
    let (mut traffic, tokens) = (hk_core::plan::rope::traffic(call), host.tokens(n_slots));
    let bytes = |name: &str| call.optional(name).map_or(0, |t| t.bytes().len() as u64);
    let mut slots: Vec<_> = (0..host.cached()).filter_map(|t| tokens.slot(t)).collect();
    let unread = host.cached() - slots.len();
    traffic.read -= bytes(values) / host.cached().max(1) as u64 * unread as u64;
    slots.sort_unstable();
    slots.dedup();
    for cache in caches {
        traffic.read -= bytes(cache);
        traffic.written -= bytes(cache) / n_slots.max(1) as u64 * (n_slots - slots.len()) as u64;
    }
    traffic
}
