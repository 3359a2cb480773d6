//! Operators as data.
//!
//! A family crate describes each of its operators once, in an [`Operator`]; the `hk` program, the demo, the status
//! table and the documentation are made from that. Tensors travel by name and without a static type here:
//! [`HostTensor`] on the host, [`DynTensor`] on a device. The names are those of the safe function's arguments.

use crate::buffer::Storage;
use crate::{
    CodeObjects, DType, DeviceInfo, E8M0, Element, Error, Float, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz,
    Fp8E5M2, Fp8E5M2Fnuz, Layout, Result, Stream, TensorView, TensorViewMut, bf16, f16,
};
use std::fmt;

/// Values by argument name, in order.
pub type Named<T> = Vec<(&'static str, T)>;

/// An operator of a family crate.
#[derive(Debug)]
pub struct Operator {
    /// Name, that of the safe function.
    pub name: &'static str,
    /// Crate, `hk-norm`.
    pub family: &'static str,
    /// The formula, in one line.
    pub summary: &'static str,
    /// Tensors in the order of the safe function.
    pub args: &'static [ArgSpec],
    /// Scalars and options.
    pub scalars: &'static [ScalarSpec],
    /// The compiled sources that it launches kernels from.
    pub kernels: &'static [&'static CodeObjects],
    /// Shapes of real models, what the demo and the benches run.
    pub cases: &'static [Case],
    /// Small sizes that between them launch every kernel: what sanitizers and mutants run on.
    pub corners: &'static [Case],
    /// The outputs for these inputs, in the order of `args`; checks what the inputs must have in common. Optional
    /// outputs are among them if the call asks for them ([`Call::wants`]).
    pub outputs: fn(&CallSpec) -> Result<Named<TensorSpec>>,
    /// Calls the safe function.
    pub run: fn(&Stream, &mut DeviceCall) -> Result<()>,
    /// The outputs again, in f64 and plain loops.
    pub reference: fn(&HostCall) -> Result<Named<HostTensorF64>>,
    /// Bytes that any implementation has to move.
    pub traffic: fn(&HostCall) -> Traffic,
}

/// One of the ways in which an operator can make what a call asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// What it is, by name; the same names for all of an operator.
    pub values: Vec<(&'static str, String)>,
    /// The one that it takes.
    pub chosen: bool,
}

/// The ways that a family's operators have, given the call and the device.
pub type Choices = fn(&CallSpec, &DeviceInfo) -> Result<Vec<Choice>>;

/// What an argument is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Role {
    /// Read.
    In,
    /// Written; how far it may be from the reference.
    Out(Tolerance),
    /// Read and written in place: comes as an input and is an output.
    InOut(Tolerance),
}

impl Role {
    /// Read: has to come with a call.
    pub const fn is_input(self) -> bool {
        !matches!(self, Self::Out(_))
    }

    /// Written, and how far it may be from the reference.
    pub const fn output(self) -> Option<Tolerance> {
        match self {
            Self::In => None,
            Self::Out(tolerance) | Self::InOut(tolerance) => Some(tolerance),
        }
    }
}

/// A tensor argument of an operator.
#[derive(Debug, Clone, Copy)]
pub struct ArgSpec {
    /// Name.
    pub name: &'static str,
    /// Read or written.
    pub role: Role,
    /// May be left out.
    pub optional: bool,
    /// Element types it can have. Which of them fit together is for `outputs` and the safe function to check.
    pub dtypes: &'static [DType],
    /// Fewest and most axes.
    pub rank: (usize, usize),
    /// What the axes mean: `[rows, cols]`.
    pub shape: &'static str,
    /// What example data for it looks like.
    pub sample: Sample,
}

/// Distribution of example data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sample {
    /// Normal.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        deviation: f32,
    },
    /// Uniform.
    Uniform {
        /// Lower bound.
        low: f32,
        /// Upper bound, excluded.
        high: f32,
    },
    /// Uniform integers.
    Integers {
        /// Lower bound.
        low: i64,
        /// Upper bound, excluded.
        high: i64,
    },
    /// Integers from 0 to `below`, excluded, none of them twice: slots, rows.
    Distinct {
        /// Upper bound, excluded; at least the number of elements.
        below: i64,
    },
    /// `0, step, 2 * step, ..`: where sequences of one length begin.
    Steps {
        /// From one element to the next.
        step: i64,
    },
    /// Positive, with a sum of one along the last axis, over some orders of magnitude.
    Probabilities,
}

/// A scalar argument or an option of an operator.
#[derive(Debug, Clone, Copy)]
pub struct ScalarSpec {
    /// Name.
    pub name: &'static str,
    /// Value if none is given; its kind is the scalar's kind.
    pub default: Scalar,
    /// The values of a [`Scalar::Choice`]; empty for other kinds.
    pub choices: &'static [&'static str],
    /// What it means.
    pub summary: &'static str,
}

/// The value of a scalar.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    /// A real number.
    Float(f64),
    /// An integer.
    Int(i64),
    /// A switch.
    Bool(bool),
    /// One of the names that the specification lists.
    Choice(&'static str),
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(x) => write!(f, "{x:?}"),
            Self::Int(x) => write!(f, "{x}"),
            Self::Bool(x) => write!(f, "{x}"),
            Self::Choice(x) => f.write_str(x),
        }
    }
}

/// Inputs and scalars at a size that a real model has.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Where the size comes from: `Llama-3 8B, 128 tokens`.
    pub label: &'static str,
    /// The inputs, and the optional outputs to ask for, with their shapes.
    pub tensors: &'static [(&'static str, DType, &'static [usize])],
    /// Scalars that differ from their default.
    pub scalars: &'static [(&'static str, Scalar)],
}

/// Bytes that an operator has to move at least: each input read once, each output written once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
}

impl Traffic {
    /// Every tensor of the call once: those that it is given are read, those that it makes or updates are written.
    pub fn once(call: &HostCall) -> Self {
        let bytes = |spec: &TensorSpec| spec.bytes().unwrap_or(0) as u64;
        let updated =
            call.tensors().filter(|(n, _)| call.op.arg(n).is_some_and(|a| a.role.output().is_some()));
        let made = (call.op.outputs)(&call.spec()).unwrap_or_default();
        Self {
            read: call.tensors().map(|(_, t)| t.bytes.len() as u64).sum(),
            written: updated.map(|(_, t)| t.bytes.len() as u64).sum::<u64>()
                + made.iter().map(|(_, spec)| bytes(spec)).sum::<u64>(),
        }
    }
}

/// How far a result may be from the f64 reference of the same, already rounded inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Tolerance {
    /// The same bits.
    Exact,
    /// Elementwise arithmetic.
    Elementwise,
    /// A reduction along a row, then elementwise arithmetic.
    Reduction,
    /// The nearest element, or the one next to it: codes of a quantizer, where a value may lie on either side of a tie.
    Neighbour,
    /// `|got - want| <= rtol |want| + atol`, whatever the type.
    Within {
        /// Relative to the reference.
        rtol: f64,
        /// Absolute.
        atol: f64,
    },
    /// A sum in `f32`, rounded once: `|got - want| <= rtol |want| + terms magnitude + atol`, where `rtol` and `atol` are the
    /// rounding to the result's type, and the magnitude is the sum of the absolute terms ([`HostTensorF64::magnitudes`]).
    Sum {
        /// Error of the sum, relative to its magnitude.
        terms: f64,
    },
}

impl Tolerance {
    /// `(rtol, atol)` for a result of this type: `|got - want| <= rtol |want| + atol`, for [`Tolerance::Sum`] without the error
    /// of the sum. Zero for [`Tolerance::Exact`], and
    /// for types other than `f32`, `f16` and `bf16` in the classes of arithmetic.
    pub const fn bounds(self, dtype: DType) -> (f64, f64) {
        match (self, dtype) {
            (Self::Within { rtol, atol }, _) => (rtol, atol),
            // The step from a value to the next, at most, and the step at zero.
            (Self::Neighbour, DType::Fp8E4M3) => (1.0 / 8.0, 1.0 / 512.0),
            (Self::Neighbour, DType::Fp8E4M3Fnuz) => (1.0 / 8.0, 1.0 / 1024.0),
            (Self::Neighbour, DType::Fp8E5M2) => (1.0 / 4.0, 1.0 / 65536.0),
            (Self::Neighbour, DType::Fp8E5M2Fnuz) => (1.0 / 4.0, 1.0 / 131072.0),
            (Self::Neighbour, DType::Fp4x2) => (0.5, 0.5),
            (Self::Neighbour, DType::E8M0) => (1.0, 0.0),
            (Self::Neighbour, DType::Bf16) => (1.0 / 128.0, 0.0),
            (Self::Neighbour, DType::F16) => (1.0 / 1024.0, 0.0),
            (Self::Neighbour, DType::F32) => (f32::EPSILON as f64, 0.0),
            (Self::Neighbour, _) => (0.0, 1.0),
            (Self::Elementwise, DType::Bf16) => (8e-3, 1e-6),
            (Self::Elementwise, DType::F16) => (1e-3, 1e-6),
            (Self::Elementwise, DType::F32) => (4e-6, 1e-6),
            (Self::Reduction, DType::Bf16) => (8e-3, 1e-5),
            (Self::Reduction, DType::F16) => (1e-3, 1e-5),
            (Self::Reduction, DType::F32) => (1e-5, 1e-6),
            // Half a step; of f32 a few, for the arithmetic after the sum.
            (Self::Sum { .. }, DType::Bf16) => (1.0 / 256.0, f32::MIN_POSITIVE as f64),
            (Self::Sum { .. }, DType::F16) => (1.0 / 2048.0, 1.0 / 33_554_432.0),
            (Self::Sum { .. }, DType::F32) => (2.0 * f32::EPSILON as f64, f32::MIN_POSITIVE as f64),
            _ => (0.0, 0.0),
        }
    }
}

/// Element type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// With this element type and shape.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    /// Size in bytes.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if it does not fit an `i64`, [`Error::Shape`] beyond five axes.
    pub fn bytes(&self) -> Result<usize> {
        let elements = Layout::contiguous(&self.shape)?.numel();
        let bytes = elements.checked_mul(self.dtype.size_bytes()).filter(|&b| b <= i64::MAX as usize);
        bytes.ok_or_else(|| {
            let what = format!("{:?} of {}", self.shape, self.dtype);
            Error::too_large("TensorSpec", "shape", what, i64::MAX as u64)
        })
    }
}

/// A tensor that can say what it is.
pub trait Described {
    /// Element type.
    fn dtype(&self) -> DType;
    /// Shape.
    fn shape(&self) -> &[usize];
    /// Both.
    fn spec(&self) -> TensorSpec {
        TensorSpec::new(self.dtype(), self.shape())
    }
}

impl Described for TensorSpec {
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
}

/// A contiguous tensor on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    spec: TensorSpec,
    bytes: Vec<u8>,
}

impl Described for HostTensor {
    fn dtype(&self) -> DType {
        self.spec.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.spec.shape
    }
}

/// Runs `$body` with `$t` as the type of a [`Float`], or answers that the argument cannot be of another type.
///
/// `with_float!("rmsnorm", "x", dtype, T => rmsnorm::<T>(..))`
#[macro_export]
macro_rules! with_float {
    ($op:expr, $arg:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::DType::Bf16 => {
                type $t = $crate::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $t = $crate::f16;
                $body
            }
            $crate::DType::F32 => {
                type $t = f32;
                $body
            }
            other => Err($crate::Error::dtype($op, $arg, other, "bf16, f16, f32")),
        }
    };
}

/// Runs `$body` with `$t` as the type of a dtype.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $t = f32;
                $body
            }
            DType::F16 => {
                type $t = f16;
                $body
            }
            DType::Bf16 => {
                type $t = bf16;
                $body
            }
            DType::I8 => {
                type $t = i8;
                $body
            }
            DType::I16 => {
                type $t = i16;
                $body
            }
            DType::I32 => {
                type $t = i32;
                $body
            }
            DType::I64 => {
                type $t = i64;
                $body
            }
            DType::U8 => {
                type $t = u8;
                $body
            }
            DType::U32 => {
                type $t = u32;
                $body
            }
            DType::Fp8E4M3Fnuz => {
                type $t = Fp8E4M3Fnuz;
                $body
            }
            DType::Fp8E5M2Fnuz => {
                type $t = Fp8E5M2Fnuz;
                $body
            }
            DType::Fp8E4M3 => {
                type $t = Fp8E4M3;
                $body
            }
            DType::Fp8E5M2 => {
                type $t = Fp8E5M2;
                $body
            }
            DType::Fp4x2 => {
                type $t = Fp4x2;
                $body
            }
            DType::E8M0 => {
                type $t = E8M0;
                $body
            }
        }
    };
}

/// Conversion of whole tensors.
trait Convert: Element {
    fn decode(self, out: &mut Vec<f64>);
    /// The nearest element to what `draw` gives, called once per value that the element holds.
    fn encode(draw: impl FnMut() -> f64) -> Self;
}

macro_rules! convert {
    ($($t:ty: |$v:ident| $decode:expr, |$draw:ident| $encode:expr;)*) => {$(
        impl Convert for $t {
            fn decode(self, out: &mut Vec<f64>) {
                let $v = self;
                out.extend($decode);
            }
            fn encode(mut $draw: impl FnMut() -> f64) -> Self {
                $encode
            }
        }
    )*};
}

convert! {
    f32: |v| [f64::from(v)], |draw| draw() as f32;
    f16: |v| [Float::to_f64(v)], |draw| Float::from_f64(draw());
    bf16: |v| [Float::to_f64(v)], |draw| Float::from_f64(draw());
    i8: |v| [f64::from(v)], |draw| draw().round_ties_even() as i8;
    i16: |v| [f64::from(v)], |draw| draw().round_ties_even() as i16;
    i32: |v| [f64::from(v)], |draw| draw().round_ties_even() as i32;
    i64: |v| [v as f64], |draw| draw().round_ties_even() as i64;
    u8: |v| [f64::from(v)], |draw| draw().round_ties_even() as u8;
    u32: |v| [f64::from(v)], |draw| draw().round_ties_even() as u32;
    Fp8E4M3Fnuz: |v| [f64::from(v.to_f32())], |draw| Self::from_f32_saturating(draw() as f32);
    Fp8E5M2Fnuz: |v| [f64::from(v.to_f32())], |draw| Self::from_f32_saturating(draw() as f32);
    Fp8E4M3: |v| [f64::from(v.to_f32())], |draw| Self::from_f32_saturating(draw() as f32);
    Fp8E5M2: |v| [f64::from(v.to_f32())], |draw| Self::from_f32_saturating(draw() as f32);
    Fp4x2: |v| v.to_f32().map(f64::from), |draw| {
        Self::from_f32([draw() as f32, draw() as f32], Fp4Rounding::NearestEven)
    };
    E8M0: |v| [f64::from(v.to_f32())], |draw| Self::from_exponent(draw().log2().round() as i32);
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn draw(&mut self, sample: Sample) -> f64 {
        match sample {
            // The sum of twelve uniform numbers: near enough to normal, and the same bits on every host.
            Sample::Normal { mean, deviation } => {
                let z = (0..12).map(|_| self.unit()).sum::<f64>() - 6.0;
                f64::from(mean) + f64::from(deviation) * z
            }
            Sample::Uniform { low, high } => {
                f64::from(low) + (f64::from(high) - f64::from(low)) * self.unit()
            }
            Sample::Integers { low, high } => self.below(low, high) as f64,
            Sample::Distinct { .. } | Sample::Steps { .. } | Sample::Probabilities => {
                unreachable!("these depend on the other elements: `sequence`")
            }
        }
    }

    /// Uniform in `low..high`.
    fn below(&mut self, low: i64, high: i64) -> i64 {
        let range = high.saturating_sub(low).max(1) as u64;
        low.wrapping_add((self.bits() % range) as i64)
    }

    /// `n` values whose rows have `cols` of them.
    fn sequence(&mut self, sample: Sample, n: usize, cols: usize) -> Vec<f64> {
        match sample {
            Sample::Distinct { below } => {
                // The first steps of a shuffle; only what it has moved is kept.
                let mut moved = std::collections::HashMap::new();
                let pick = |i: i64| {
                    let at = self.below(i, below);
                    let here = moved.get(&i).copied().unwrap_or(i);
                    moved.insert(at, here).unwrap_or(at) as f64
                };
                (0..n as i64).map(pick).collect()
            }
            Sample::Steps { step } => (0..n as i64).map(|i| i.wrapping_mul(step) as f64).collect(),
            Sample::Probabilities => {
                let normal = Sample::Normal { mean: 0.0, deviation: 2.0 };
                let mut values: Vec<f64> = (0..n).map(|_| self.draw(normal).exp()).collect();
                for row in values.chunks_mut(cols.max(1)) {
                    let sum: f64 = row.iter().sum();
                    row.iter_mut().for_each(|v| *v /= sum);
                }
                values
            }
            _ => (0..n).map(|_| self.draw(sample)).collect(),
        }
    }
}

impl HostTensor {
    /// A tensor of these elements.
    ///
    /// # Errors
    /// [`Error::Shape`] if `shape` has not as many elements.
    pub fn new<T: Element>(shape: impl Into<Vec<usize>>, elements: &[T]) -> Result<Self> {
        Self::from_bytes(TensorSpec::new(T::DTYPE, shape), bytemuck::cast_slice(elements).to_vec())
    }

    /// A tensor of these bytes, little-endian.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are more or fewer bytes than the shape and type need.
    pub fn from_bytes(spec: TensorSpec, bytes: Vec<u8>) -> Result<Self> {
        let want = spec.bytes()?;
        if bytes.len() != want {
            let want = format!("{want}, for shape {:?} of {}", spec.shape, spec.dtype);
            return Err(Error::shape("HostTensor", "bytes", [bytes.len()], want));
        }
        Ok(Self { spec, bytes })
    }

    /// Example data, the same for the same seed. Elements that do not depend on each other repeat after 2^22 or so.
    ///
    /// # Errors
    /// As [`TensorSpec::bytes`].
    pub fn sample(spec: TensorSpec, sample: Sample, seed: u64) -> Result<Self> {
        /// The largest prime below 2^22, so that no two rows are equal.
        const PERIOD: usize = 4_194_301;
        let len = spec.bytes()?;
        let n = match sample {
            Sample::Distinct { .. } | Sample::Steps { .. } | Sample::Probabilities => usize::MAX,
            Sample::Normal { .. } | Sample::Uniform { .. } | Sample::Integers { .. } => PERIOD,
        };
        let n = n.min(len / spec.dtype.size_bytes());
        let per_element = if spec.dtype == DType::Fp4x2 { 2 } else { 1 };
        let cols = per_element * spec.shape.last().copied().unwrap_or(1);
        let mut values = Random(seed).sequence(sample, n * per_element, cols).into_iter();
        let mut bytes = with_element!(spec.dtype, T => {
            let elements: Vec<T> = (0..n).map(|_| T::encode(|| values.next().unwrap_or(0.0))).collect();
            bytemuck::cast_slice(&elements).to_vec()
        });
        let period = bytes.len();
        bytes.reserve_exact(len - period);
        while bytes.len() < len {
            bytes.extend_from_within(..period.min(len - bytes.len()));
        }
        Ok(Self { spec, bytes })
    }

    /// The elements, little-endian, row-major.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::DType`] for another type than `T`.
    pub fn elements<T: Element>(&self) -> Result<Vec<T>> {
        expect_dtype::<T>("HostTensor::elements", "tensor", self.spec.dtype)?;
        // The bytes may not be aligned for `T`.
        Ok(self.bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }

    /// Every element as f64, exactly (i64 beyond 2^53: rounded). Pairs of fp4 give two each.
    pub fn to_f64(&self) -> Vec<f64> {
        let mut values = Vec::with_capacity(self.bytes.len() / self.spec.dtype.size_bytes());
        with_element!(self.spec.dtype, T => {
            for bytes in self.bytes.chunks_exact(size_of::<T>()) {
                bytemuck::pod_read_unaligned::<T>(bytes).decode(&mut values);
            }
        });
        values
    }
}

fn expect_dtype<T: Element>(op: &'static str, arg: &'static str, got: DType) -> Result<()> {
    if got == T::DTYPE { Ok(()) } else { Err(Error::dtype(op, arg, got, T::DTYPE)) }
}

/// A tensor of f64 on the host: what a reference gives.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensorF64 {
    /// Shape; of pairs of fp4, that of the single values.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub values: Vec<f64>,
    /// For [`Tolerance::Sum`]: of each element, what the sum of its terms' absolute values is at most. Empty: as the elements.
    pub magnitudes: Vec<f64>,
}

impl HostTensorF64 {
    /// With these elements, and no magnitudes.
    pub fn new(shape: impl Into<Vec<usize>>, values: Vec<f64>) -> Self {
        Self { shape: shape.into(), values, magnitudes: Vec::new() }
    }
}

/// A contiguous tensor on a device, its element type a value.
pub struct DynTensor {
    storage: Storage,
    spec: TensorSpec,
}

impl Described for DynTensor {
    fn dtype(&self) -> DType {
        self.spec.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.spec.shape
    }
}

impl DynTensor {
    /// Copies a tensor to the device of `stream`.
    ///
    /// # Errors
    /// As [`Stream::upload`].
    pub fn upload(stream: &Stream, tensor: &HostTensor) -> Result<Self> {
        let new = Self::alloc(stream, tensor.spec())?;
        stream.write_bytes(&new.storage, &tensor.bytes)?;
        Ok(new)
    }

    /// A tensor whose bytes are all `0xff`: NaN for floats, so that what an operator fails to write shows.
    ///
    /// # Errors
    /// As [`Stream::alloc_zeroed`].
    pub fn poisoned(stream: &Stream, spec: TensorSpec) -> Result<Self> {
        let new = Self::alloc(stream, spec)?;
        stream.fill_bytes(&new.storage, 0xff)?;
        Ok(new)
    }

    fn alloc(stream: &Stream, spec: TensorSpec) -> Result<Self> {
        let label = format_args!("{} {:?}", spec.dtype, spec.shape);
        Ok(Self { storage: Storage::new(stream, spec.bytes()?, &label)?, spec })
    }

    /// Copies the tensor to the host, after everything queued on `stream`; blocks until it is there.
    ///
    /// # Errors
    /// As [`Stream::read`].
    pub fn download(&self, stream: &Stream) -> Result<HostTensor> {
        self.storage.used_on("DynTensor::download", "tensor", stream)?;
        let mut bytes = vec![0; self.storage.bytes()];
        stream.read_bytes(&self.storage, &mut bytes)?;
        Ok(HostTensor { spec: self.spec.clone(), bytes })
    }

    /// The tensor with its static type.
    ///
    /// # Errors
    /// [`Error::DType`], naming `op` and `arg`, for another type than `T`.
    pub fn view<T: Element>(&self, op: &'static str, arg: &'static str) -> Result<TensorView<'_, T>> {
        expect_dtype::<T>(op, arg, self.spec.dtype)?;
        let layout = Layout::contiguous(&self.spec.shape)?;
        TensorView::new(&self.storage, layout.numel(), layout, 0)
    }

    /// The tensor with its static type, to be written.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn view_mut<T: Element>(
        &mut self,
        op: &'static str,
        arg: &'static str,
    ) -> Result<TensorViewMut<'_, T>> {
        expect_dtype::<T>(op, arg, self.spec.dtype)?;
        let layout = Layout::contiguous(&self.spec.shape)?;
        TensorViewMut::new(&self.storage, layout.numel(), layout, 0)
    }
}

impl fmt::Debug for DynTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (spec, device) = (&self.spec, self.storage.device());
        write!(f, "DynTensor({} {:?} on {})", spec.dtype, spec.shape, device.spec())
    }
}

/// The named inputs of one call of an operator, its scalars, and which optional outputs it asks for.
#[derive(Debug)]
pub struct Call<V> {
    op: &'static Operator,
    tensors: Named<V>,
    scalars: Named<Scalar>,
    wanted: Vec<&'static str>,
}

/// A call with the types and shapes of its inputs only.
pub type CallSpec = Call<TensorSpec>;
/// A call with its inputs on the host.
pub type HostCall = Call<HostTensor>;

impl CallSpec {
    /// The call with example data, the same for the same seed.
    ///
    /// # Errors
    /// As [`TensorSpec::bytes`].
    pub fn sample(&self, seed: u64) -> Result<HostCall> {
        let mut tensors = Vec::with_capacity(self.tensors.len());
        for (i, (name, spec)) in self.tensors.iter().enumerate() {
            let sample = self.op.arg(name).map_or(Sample::Normal { mean: 0.0, deviation: 1.0 }, |a| a.sample);
            let seed = seed.wrapping_add((i as u64) << 32);
            tensors.push((*name, HostTensor::sample(spec.clone(), sample, seed)?));
        }
        Ok(Call { op: self.op, tensors, scalars: self.scalars.clone(), wanted: self.wanted.clone() })
    }
}

impl<V: Described> Call<V> {
    /// Without inputs, every scalar at its default.
    pub fn new(op: &'static Operator) -> Self {
        let scalars = op.scalars.iter().map(|s| (s.name, s.default)).collect();
        Self { op, tensors: Vec::new(), scalars, wanted: Vec::new() }
    }

    /// The operator.
    pub fn operator(&self) -> &'static Operator {
        self.op
    }

    /// Gives the input `name`, replacing an earlier one.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such input, [`Error::DType`] or [`Error::Shape`] if its element
    /// type or number of axes is not served.
    pub fn set(&mut self, name: &str, tensor: V) -> Result<()> {
        let op = self.op.name;
        let is_input = |a: &&ArgSpec| a.name == name && a.role.is_input();
        let Some(arg) = self.op.args.iter().find(is_input) else {
            let inputs = self.op.args.iter().filter(|a| a.role.is_input()).map(|a| a.name);
            let want = format!("one of {}", inputs.collect::<Vec<_>>().join(", "));
            return Err(Error::argument(op, "input", format!("`{name}`"), want));
        };
        arg.check(op, &tensor)?;
        self.tensors.retain(|(n, _)| *n != arg.name);
        self.tensors.push((arg.name, tensor));
        Ok(())
    }

    /// Asks for the optional output `name`.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such optional output.
    pub fn want(&mut self, name: &str) -> Result<()> {
        let is_optional = |a: &&ArgSpec| a.name == name && !a.role.is_input() && a.optional;
        let Some(arg) = self.op.args.iter().find(is_optional) else {
            let want = "an optional output of the operator";
            return Err(Error::argument(self.op.name, "output", format!("`{name}`"), want));
        };
        if !self.wants(name) {
            self.wanted.push(arg.name);
        }
        Ok(())
    }

    /// Sets a scalar.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such scalar or the value is of another kind.
    pub fn set_scalar(&mut self, name: &str, value: Scalar) -> Result<()> {
        let spec = self.scalar_spec(name)?;
        let same_kind = std::mem::discriminant(&spec.default) == std::mem::discriminant(&value);
        let listed = !matches!(value, Scalar::Choice(c) if !spec.choices.contains(&c));
        if !same_kind || !listed {
            return Err(Error::argument(self.op.name, spec.name, value, spec.domain()));
        }
        self.scalars.retain(|(n, _)| *n != spec.name);
        self.scalars.push((spec.name, value));
        Ok(())
    }

    /// Sets a scalar from text, as it comes on a command line.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such scalar or the text is no value of its kind.
    pub fn parse_scalar(&mut self, name: &str, text: &str) -> Result<()> {
        let spec = self.scalar_spec(name)?;
        let value = match spec.default {
            Scalar::Float(_) => text.parse().ok().map(Scalar::Float),
            Scalar::Int(_) => text.parse().ok().map(Scalar::Int),
            Scalar::Bool(_) => text.parse().ok().map(Scalar::Bool),
            Scalar::Choice(_) => spec.choices.iter().find(|c| **c == text).map(|c| Scalar::Choice(c)),
        };
        let wrong = || Error::argument(self.op.name, spec.name, format!("`{text}`"), spec.domain());
        self.set_scalar(name, value.ok_or_else(wrong)?)
    }

    /// Checks that every input that is not optional is there.
    ///
    /// # Errors
    /// [`Error::Argument`], naming the missing one.
    pub fn check_complete(&self) -> Result<()> {
        let needed = self.op.args.iter().filter(|a| a.role.is_input() && !a.optional);
        for arg in needed {
            self.get(arg.name)?;
        }
        Ok(())
    }

    /// The types and shapes of the inputs, and everything else.
    pub fn spec(&self) -> CallSpec {
        Call {
            op: self.op,
            tensors: self.tensors.iter().map(|(n, t)| (*n, t.spec())).collect(),
            scalars: self.scalars.clone(),
            wanted: self.wanted.clone(),
        }
    }

    /// The scalars, with their names.
    pub fn scalars(&self) -> impl Iterator<Item = (&'static str, Scalar)> {
        self.scalars.iter().copied()
    }

    /// The optional outputs that it asks for.
    pub fn wanted(&self) -> &[&'static str] {
        &self.wanted
    }

    /// The inputs, with their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &V)> {
        self.tensors.iter().map(|(n, t)| (*n, t))
    }

    /// An input.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is missing.
    pub fn get(&self, name: &'static str) -> Result<&V> {
        self.optional(name).ok_or_else(|| Error::argument(self.op.name, name, "no tensor", "a tensor"))
    }

    /// An input that may be missing.
    pub fn optional(&self, name: &str) -> Option<&V> {
        self.tensors.iter().find(|(n, _)| *n == name).map(|(_, t)| t)
    }

    /// True if the call asks for this optional output.
    pub fn wants(&self, name: &str) -> bool {
        self.wanted.contains(&name)
    }

    /// A scalar.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such scalar.
    pub fn scalar(&self, name: &str) -> Result<Scalar> {
        let spec = self.scalar_spec(name)?;
        Ok(self.scalars.iter().find(|(n, _)| *n == spec.name).map_or(spec.default, |(_, s)| *s))
    }

    /// A scalar that is a real number.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such scalar or it is of another kind.
    pub fn float(&self, name: &str) -> Result<f64> {
        match self.scalar(name)? {
            Scalar::Float(x) => Ok(x),
            other => Err(self.wrong_kind(other, "a real number")),
        }
    }

    /// A scalar that is an integer.
    ///
    /// # Errors
    /// As [`float`](Self::float).
    pub fn int(&self, name: &str) -> Result<i64> {
        match self.scalar(name)? {
            Scalar::Int(x) => Ok(x),
            other => Err(self.wrong_kind(other, "an integer")),
        }
    }

    /// A scalar that is a switch.
    ///
    /// # Errors
    /// As [`float`](Self::float).
    pub fn bool(&self, name: &str) -> Result<bool> {
        match self.scalar(name)? {
            Scalar::Bool(x) => Ok(x),
            other => Err(self.wrong_kind(other, "true or false")),
        }
    }

    /// A scalar that is one of several names.
    ///
    /// # Errors
    /// As [`float`](Self::float).
    pub fn choice(&self, name: &str) -> Result<&'static str> {
        match self.scalar(name)? {
            Scalar::Choice(x) => Ok(x),
            other => Err(self.wrong_kind(other, "a name")),
        }
    }

    fn wrong_kind(&self, got: Scalar, want: &str) -> Error {
        Error::argument(self.op.name, "scalar", got, want)
    }

    fn scalar_spec(&self, name: &str) -> Result<&'static ScalarSpec> {
        self.op.scalars.iter().find(|s| s.name == name).ok_or_else(|| {
            let names: Vec<_> = self.op.scalars.iter().map(|s| s.name).collect();
            let want = format!("one of {}", names.join(", "));
            Error::argument(self.op.name, "scalar", format!("`{name}`"), want)
        })
    }
}

impl ScalarSpec {
    /// The values it can have, in words.
    pub fn domain(&self) -> String {
        match self.default {
            Scalar::Float(_) => "a real number".into(),
            Scalar::Int(_) => "an integer".into(),
            Scalar::Bool(_) => "true or false".into(),
            Scalar::Choice(_) => format!("one of {}", self.choices.join(", ")),
        }
    }
}

impl ArgSpec {
    /// A tensor that is read, of normal example data, with `rank` axes or, by [`ranks`](Self::ranks), others.
    pub const fn input(
        name: &'static str,
        dtypes: &'static [DType],
        rank: usize,
        shape: &'static str,
    ) -> Self {
        let sample = Sample::Normal { mean: 0.0, deviation: 1.0 };
        Self { name, role: Role::In, optional: false, dtypes, rank: (rank, rank), shape, sample }
    }

    /// A tensor that is written.
    pub const fn output(
        name: &'static str,
        tolerance: Tolerance,
        dtypes: &'static [DType],
        rank: usize,
        shape: &'static str,
    ) -> Self {
        Self { role: Role::Out(tolerance), ..Self::input(name, dtypes, rank, shape) }
    }

    /// A tensor that is updated in place.
    pub const fn updated(
        name: &'static str,
        tolerance: Tolerance,
        dtypes: &'static [DType],
        rank: usize,
        shape: &'static str,
    ) -> Self {
        Self { role: Role::InOut(tolerance), ..Self::input(name, dtypes, rank, shape) }
    }

    /// It may be left out.
    pub const fn optional(self) -> Self {
        Self { optional: true, ..self }
    }

    /// With this example data.
    pub const fn sampled(self, sample: Sample) -> Self {
        Self { sample, ..self }
    }

    /// With at least `fewest` and at most `most` axes.
    pub const fn ranks(self, fewest: usize, most: usize) -> Self {
        Self { rank: (fewest, most), ..self }
    }

    /// Checks element type and number of axes.
    fn check(&self, op: &'static str, tensor: &impl Described) -> Result<()> {
        if !self.dtypes.contains(&tensor.dtype()) {
            let names: Vec<_> = self.dtypes.iter().map(|d| d.name()).collect();
            return Err(Error::dtype(op, self.name, tensor.dtype(), names.join(", ")));
        }
        let (least, most) = self.rank;
        if !(least..=most).contains(&tensor.shape().len()) {
            let want = format!("{least} to {most} axes: {}", self.shape);
            return Err(Error::shape(op, self.name, tensor.shape(), want));
        }
        Ok(())
    }
}

/// A call with its tensors on a device, as [`Operator::run`] takes it.
#[derive(Debug)]
pub struct DeviceCall {
    inputs: Call<DynTensor>,
    outputs: Named<DynTensor>,
    workspace: Option<DynTensor>,
}

impl DeviceCall {
    /// Copies the inputs to the device and allocates the outputs, poisoned ([`DynTensor::poisoned`]).
    ///
    /// # Errors
    /// What `check_complete` and the operator's `outputs` find wrong; as [`Stream::upload`].
    pub fn prepare(stream: &Stream, call: &HostCall) -> Result<Self> {
        call.check_complete()?;
        let mut new = (call.op.outputs)(&call.spec())?;
        let mut inputs: Call<DynTensor> = Call {
            op: call.op,
            tensors: Vec::new(),
            scalars: call.scalars.clone(),
            wanted: call.wanted.clone(),
        };
        let mut outputs = Vec::new();
        for arg in call.op.args {
            let given = call.optional(arg.name).map(|t| DynTensor::upload(stream, t)).transpose()?;
            match (arg.role, given) {
                (Role::In, Some(tensor)) => inputs.tensors.push((arg.name, tensor)),
                (Role::InOut(_), Some(tensor)) => outputs.push((arg.name, tensor)),
                (Role::Out(_), _) => {
                    if let Some(i) = new.iter().position(|(n, _)| *n == arg.name) {
                        let (name, spec) = new.swap_remove(i);
                        outputs.push((name, DynTensor::poisoned(stream, spec)?));
                    }
                }
                (_, None) => {}
            }
        }
        Ok(Self { inputs, outputs, workspace: None })
    }

    /// The inputs with the scalars, and the outputs to be taken one by one.
    pub fn split(&mut self) -> (Inputs<'_>, Outputs<'_>) {
        let op = self.inputs.op.name;
        let tensors = self.outputs.iter_mut().map(|(n, t)| (*n, t)).collect();
        (Inputs(&self.inputs), Outputs { op, tensors, workspace: Some(&mut self.workspace) })
    }

    /// The operator.
    pub fn operator(&self) -> &'static Operator {
        self.inputs.op
    }

    /// The outputs, those updated in place included, in the order of the arguments.
    pub fn outputs(&self) -> impl Iterator<Item = (&'static str, &DynTensor)> {
        self.outputs.iter().map(|(n, t)| (*n, t))
    }
}

/// The inputs of a [`DeviceCall`]; everything else is that of the [`Call`] behind it.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a>(&'a Call<DynTensor>);

impl<'a> Inputs<'a> {
    /// An input with its static type.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is missing, [`Error::DType`] for another type than `T`.
    pub fn view<T: Element>(&self, name: &'static str) -> Result<TensorView<'a, T>> {
        self.0.get(name)?.view(self.0.op.name, name)
    }

    /// An input that may be missing.
    ///
    /// # Errors
    /// [`Error::DType`] for another type than `T`.
    pub fn optional_view<T: Element>(&self, name: &'static str) -> Result<Option<TensorView<'a, T>>> {
        self.0.optional(name).map(|t| t.view(self.0.op.name, name)).transpose()
    }
}

impl std::ops::Deref for Inputs<'_> {
    type Target = Call<DynTensor>;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

/// The outputs of a [`DeviceCall`], each to be taken once.
#[derive(Debug)]
pub struct Outputs<'a> {
    op: &'static str,
    tensors: Named<&'a mut DynTensor>,
    workspace: Option<&'a mut Option<DynTensor>>,
}

impl<'a> Outputs<'a> {
    /// An output with its static type.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is none or it is taken, [`Error::DType`] for another type than `T`.
    pub fn take<T: Element>(&mut self, name: &'static str) -> Result<TensorViewMut<'a, T>> {
        let op = self.op;
        let missing = || Error::argument(op, name, "no tensor", "an output, taken once");
        self.take_optional(name)?.ok_or_else(missing)
    }

    /// An output that the call may not ask for.
    ///
    /// # Errors
    /// [`Error::DType`] for another type than `T`.
    pub fn take_optional<T: Element>(&mut self, name: &'static str) -> Result<Option<TensorViewMut<'a, T>>> {
        let Some(i) = self.tensors.iter().position(|(n, _)| *n == name) else { return Ok(None) };
        self.tensors.swap_remove(i).1.view_mut(self.op, name).map(Some)
    }

    /// A workspace of `len` elements, to be taken once a run: allocated by the first run of a call, kept for the others.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is taken; as [`Stream::alloc_zeroed`].
    pub fn workspace<T: Element>(&mut self, stream: &Stream, len: usize) -> Result<TensorViewMut<'a, T>> {
        let taken = || Error::argument(self.op, "workspace", "taken before", "taken once a run");
        let slot = self.workspace.take().ok_or_else(taken)?;
        let spec = TensorSpec::new(T::DTYPE, [len]);
        if slot.as_ref().is_none_or(|t| t.spec != spec) {
            *slot = Some(DynTensor::poisoned(stream, spec)?);
        }
        slot.as_mut().ok_or_else(taken)?.view_mut(self.op, "workspace")
    }
}

impl Operator {
    /// The argument of that name.
    pub fn arg(&self, name: &str) -> Option<&'static ArgSpec> {
        self.args.iter().find(|a| a.name == name)
    }

    /// What one of its cases calls it with.
    ///
    /// # Errors
    /// As [`Call::set`], [`Call::want`] and [`Call::set_scalar`], if the case contradicts the operator.
    pub fn spec(&'static self, case: &Case) -> Result<CallSpec> {
        let mut call = Call::new(self);
        for &(name, dtype, shape) in case.tensors {
            match self.arg(name) {
                Some(arg) if arg.role.is_input() => call.set(name, TensorSpec::new(dtype, shape))?,
                _ => call.want(name)?,
            }
        }
        for &(name, value) in case.scalars {
            call.set_scalar(name, value)?;
        }
        Ok(call)
    }

    /// One of its cases with example data, the same for the same seed.
    ///
    /// # Errors
    /// As [`spec`](Self::spec).
    pub fn example(&'static self, case: &Case, seed: u64) -> Result<HostCall> {
        self.spec(case)?.sample(seed)
    }

    /// Runs the operator: copies the inputs to the device, runs, copies the outputs back, those updated in place
    /// included, in the order of the arguments.
    ///
    /// # Errors
    /// As [`DeviceCall::prepare`], what the safe function answers, and failures of the device.
    pub fn execute(&self, stream: &Stream, call: &HostCall) -> Result<Named<HostTensor>> {
        let mut device_call = DeviceCall::prepare(stream, call)?;
        (self.run)(stream, &mut device_call)?;
        device_call.outputs().map(|(name, tensor)| Ok((name, tensor.download(stream)?))).collect()
    }
}
