//! Reductions over ranks.

use half::{bf16, f16};
use hk_core::{Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Fp8E5M2Fnuz};

/// Element types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub enum DataType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
    Fp8E4M3,
    Fp8E5M2,
    Fp8E4M3Fnuz,
    Fp8E5M2Fnuz,
}

impl DataType {
    const ALL: [Self; 14] = [
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::Bf16,
        Self::Fp8E4M3,
        Self::Fp8E5M2,
        Self::Fp8E4M3Fnuz,
        Self::Fp8E5M2Fnuz,
    ];

    /// The type of a code of `ncclDataType_t`. fp8 is that of the GPU: `fnuz` on gfx942, else OCP.
    pub fn from_code(code: i32, fnuz: bool) -> Option<Self> {
        let other = |data: &Self| match data {
            Self::Fp8E4M3 | Self::Fp8E5M2 => fnuz,
            Self::Fp8E4M3Fnuz | Self::Fp8E5M2Fnuz => !fnuz,
            _ => false,
        };
        Self::ALL.into_iter().find(|data| data.code() == code && !other(data))
    }

    /// The code in `ncclDataType_t`.
    fn code(self) -> i32 {
        match self {
            Self::I8 => 0,
            Self::U8 => 1,
            Self::I32 => 2,
            Self::U32 => 3,
            Self::I64 => 4,
            Self::U64 => 5,
            Self::F16 => 6,
            Self::F32 => 7,
            Self::F64 => 8,
            Self::Bf16 => 9,
            Self::Fp8E4M3 | Self::Fp8E4M3Fnuz => 10,
            Self::Fp8E5M2 | Self::Fp8E5M2Fnuz => 11,
        }
    }

    /// Bytes of an element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::I64 | Self::U64 | Self::F64 => 8,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            _ => 1,
        }
    }

    /// The value of an element, as a scalar of a reduction. `None` unless `bytes` is one element.
    pub fn scalar(self, bytes: &[u8]) -> Option<f64> {
        fn value<const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> f64) -> Option<f64> {
            bytes.try_into().ok().map(decode)
        }
        match self {
            Self::I8 => value(bytes, |b| i8::from_ne_bytes(b).into()),
            Self::U8 => value(bytes, |b| u8::from_ne_bytes(b).into()),
            Self::I32 => value(bytes, |b| i32::from_ne_bytes(b).into()),
            Self::U32 => value(bytes, |b| u32::from_ne_bytes(b).into()),
            Self::I64 => value(bytes, |b| i64::from_ne_bytes(b) as f64),
            Self::U64 => value(bytes, |b| u64::from_ne_bytes(b) as f64),
            Self::F16 => value(bytes, |b| f16::from_ne_bytes(b).into()),
            Self::F32 => value(bytes, |b| f32::from_ne_bytes(b).into()),
            Self::F64 => value(bytes, f64::from_ne_bytes),
            Self::Bf16 => value(bytes, |b| bf16::from_ne_bytes(b).into()),
            Self::Fp8E4M3 => value(bytes, |[b]| Fp8E4M3(b).to_f32().into()),
            Self::Fp8E5M2 => value(bytes, |[b]| Fp8E5M2(b).to_f32().into()),
            Self::Fp8E4M3Fnuz => value(bytes, |[b]| Fp8E4M3Fnuz(b).to_f32().into()),
            Self::Fp8E5M2Fnuz => value(bytes, |[b]| Fp8E5M2Fnuz(b).to_f32().into()),
        }
    }
}

/// How values of all ranks become one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reduction {
    /// The sum. Integers wrap.
    Sum,
    /// The product. Integers wrap.
    Prod,
    /// The largest. A NaN counts only where all are NaN.
    Max,
    /// The smallest. A NaN counts only where all are NaN.
    Min,
    /// The sum, divided by the number of ranks. Integers round towards zero.
    Avg,
    /// The sum of values that are multiplied by a scalar of their rank's own. Integers are multiplied as f64, and truncated.
    PreMulSum(f64),
}

impl Reduction {
    /// What all ranks agree on: scalars are each rank's own.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "product",
            Self::Max => "maximum",
            Self::Min => "minimum",
            Self::Avg => "average",
            Self::PreMulSum(_) => "scaled sum",
        }
    }
}

/// What a number type brings.
trait Number: Copy {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn scaled(self, by: f64) -> Self;
    fn over(self, count: usize) -> Self;
}

macro_rules! integers {
    ($($t:ty)*) => {$(
        impl Number for $t {
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            fn max(self, other: Self) -> Self { Ord::max(self, other) }
            fn min(self, other: Self) -> Self { Ord::min(self, other) }
            fn scaled(self, by: f64) -> Self { (self as f64 * by) as Self }
            fn over(self, count: usize) -> Self {
                Self::try_from(count).map_or(0, |count| self / count)
            }
        }
    )*};
}
integers!(i8 u8 i32 u32 i64 u64);

macro_rules! floats {
    ($($t:ty)*) => {$(
        impl Number for $t {
            fn add(self, other: Self) -> Self { self + other }
            fn mul(self, other: Self) -> Self { self * other }
            fn max(self, other: Self) -> Self { <$t>::max(self, other) }
            fn min(self, other: Self) -> Self { <$t>::min(self, other) }
            fn scaled(self, by: f64) -> Self { self * by as Self }
            fn over(self, count: usize) -> Self { self / count as Self }
        }
    )*};
}
floats!(f32 f64);

/// Reduces the values of all ranks, in the order of the ranks, each with its scalar. Inputs are of one length.
pub(crate) fn reduce(data: DataType, reduction: Reduction, inputs: &[(&[u8], f64)]) -> Vec<u8> {
    match data {
        DataType::I8 => fold(reduction, inputs, i8::from_ne_bytes, i8::to_ne_bytes),
        DataType::U8 => fold(reduction, inputs, u8::from_ne_bytes, u8::to_ne_bytes),
        DataType::I32 => fold(reduction, inputs, i32::from_ne_bytes, i32::to_ne_bytes),
        DataType::U32 => fold(reduction, inputs, u32::from_ne_bytes, u32::to_ne_bytes),
        DataType::I64 => fold(reduction, inputs, i64::from_ne_bytes, i64::to_ne_bytes),
        DataType::U64 => fold(reduction, inputs, u64::from_ne_bytes, u64::to_ne_bytes),
        DataType::F32 => fold(reduction, inputs, f32::from_ne_bytes, f32::to_ne_bytes),
        DataType::F64 => fold(reduction, inputs, f64::from_ne_bytes, f64::to_ne_bytes),
        DataType::F16 => {
            fold(reduction, inputs, |b| f16::from_ne_bytes(b).to_f32(), |v| f16::from_f32(v).to_ne_bytes())
        }
        DataType::Bf16 => {
            fold(reduction, inputs, |b| bf16::from_ne_bytes(b).to_f32(), |v| bf16::from_f32(v).to_ne_bytes())
        }
        DataType::Fp8E4M3 => {
            fold(reduction, inputs, |[b]| Fp8E4M3(b).to_f32(), |v| [Fp8E4M3::from_f32_saturating(v).0])
        }
        DataType::Fp8E5M2 => {
            fold(reduction, inputs, |[b]| Fp8E5M2(b).to_f32(), |v| [Fp8E5M2::from_f32_saturating(v).0])
        }
        DataType::Fp8E4M3Fnuz => fold(
            reduction,
            inputs,
            |[b]| Fp8E4M3Fnuz(b).to_f32(),
            |v| [Fp8E4M3Fnuz::from_f32_saturating(v).0],
        ),
        DataType::Fp8E5M2Fnuz => fold(
            reduction,
            inputs,
            |[b]| Fp8E5M2Fnuz(b).to_f32(),
            |v| [Fp8E5M2Fnuz::from_f32_saturating(v).0],
        ),
    }
}

fn fold<A: Number, const N: usize>(
    reduction: Reduction,
    inputs: &[(&[u8], f64)],
    decode: impl Fn([u8; N]) -> A,
    encode: impl Fn(A) -> [u8; N],
) -> Vec<u8> {
    let values = |&(bytes, scalar): &(&[u8], f64)| -> Vec<A> {
        let values = bytes.as_chunks::<N>().0.iter().map(|&bytes| decode(bytes));
        match reduction {
            Reduction::PreMulSum(_) => values.map(|value| value.scaled(scalar)).collect(),
            _ => values.collect(),
        }
    };
    let combine = match reduction {
        Reduction::Sum | Reduction::Avg | Reduction::PreMulSum(_) => A::add,
        Reduction::Prod => A::mul,
        Reduction::Max => A::max,
        Reduction::Min => A::min,
    };
    let Some((first, others)) = inputs.split_first() else { return vec![] };
    let mut result = values(first);
    for input in others {
        for (value, other) in result.iter_mut().zip(values(input)) {
            *value = combine(*value, other);
        }
    }
    let average = matches!(reduction, Reduction::Avg);
    let value = |value: A| encode(if average { value.over(inputs.len()) } else { value });
    result.into_iter().flat_map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<T: Copy, const N: usize>(values: &[T], encode: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        values.iter().copied().flat_map(encode).collect()
    }

    #[test]
    fn sixteen_bit_sums_are_rounded_once() {
        // 256 + 1 + 1: bf16 has 8 bits, so that rounding each step would give 256.
        let ranks = [256.0, 1.0, 1.0].map(|v| of(&[bf16::from_f32(v)], bf16::to_ne_bytes));
        let inputs: Vec<_> = ranks.iter().map(|r| (&r[..], 1.0)).collect();
        let sum = reduce(DataType::Bf16, Reduction::Sum, &inputs);
        assert_eq!(sum, of(&[bf16::from_f32(258.0)], bf16::to_ne_bytes));
    }

    #[test]
    fn every_reduction() {
        let ranks = [[7i32, -7, i32::MAX], [2, 3, 1], [1, 1, 0]].map(|r| of(&r, i32::to_ne_bytes));
        let inputs: Vec<_> = ranks.iter().zip([2.0, 1.0, 0.5]).map(|(r, scalar)| (&r[..], scalar)).collect();
        let cases = [
            (Reduction::Sum, [10, -3, i32::MIN]),
            (Reduction::Prod, [14, -21, 0]),
            (Reduction::Max, [7, 3, i32::MAX]),
            (Reduction::Min, [1, -7, 0]),
            (Reduction::Avg, [3, -1, i32::MIN / 3]),
            (Reduction::PreMulSum(0.0), [16, -11, i32::MIN]),
        ];
        for (reduction, want) in cases {
            assert_eq!(
                reduce(DataType::I32, reduction, &inputs),
                of(&want, i32::to_ne_bytes),
                "{reduction:?}"
            );
        }
        let ranks = [[1.0f32, f32::NAN], [4.0, 2.0]].map(|r| of(&r, f32::to_ne_bytes));
        let inputs: Vec<_> = ranks.iter().map(|r| (&r[..], 0.5)).collect();
        let of = |values: [f32; 2]| of(&values, f32::to_ne_bytes);
        assert_eq!(reduce(DataType::F32, Reduction::Max, &inputs), of([4.0, 2.0]));
        assert_eq!(reduce(DataType::F32, Reduction::PreMulSum(0.0), &inputs)[..4], of([2.5, 0.0])[..4]);
        assert_eq!(reduce(DataType::F32, Reduction::Avg, &inputs)[..4], of([2.5, 0.0])[..4]);
        assert!(reduce(DataType::F32, Reduction::Sum, &inputs)[4..] != of([0.0, 2.0])[4..]);
    }

    /// The formats of both targets, saturating.
    #[test]
    fn fp8_is_that_of_the_target() {
        for (data, two, largest) in [
            (DataType::from_code(10, true), 0x48, 0x7f),
            (DataType::from_code(10, false), 0x40, 0x7e),
            (DataType::from_code(11, true), 0x44, 0x7f),
            (DataType::from_code(11, false), 0x40, 0x7b),
        ] {
            let data = data.unwrap();
            assert_eq!(data.scalar(&[two]), Some(2.0));
            let sum = reduce(data, Reduction::Sum, &[(&[two, largest], 1.0), (&[0, largest], 1.0)]);
            assert_eq!(sum, [two, largest], "{data:?}");
        }
        assert_eq!(DataType::from_code(12, true), None);
        assert!((0..12).all(|code| DataType::from_code(code, true).is_some_and(|d| d.code() == code)));
    }
}
