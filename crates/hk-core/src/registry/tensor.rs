//! Tensors without a static element type, on the host and on a device.

use super::Tolerance;
use crate::buffer::Storage;
use crate::stream::zeroed_on_host;
use crate::{
    DType, E8M0, Element, Error, Float, Fp4Rounding, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Fp8E5M2Fnuz,
    Layout, Result, Stream, TensorView, TensorViewMut, bf16, f16,
};
use std::fmt;

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
            $crate::DType::F32 => {
                type $t = f32;
                $body
            }
            $crate::DType::F16 => {
                type $t = $crate::f16;
                $body
            }
            $crate::DType::Bf16 => {
                type $t = $crate::bf16;
                $body
            }
            $crate::DType::I8 => {
                type $t = i8;
                $body
            }
            $crate::DType::I16 => {
                type $t = i16;
                $body
            }
            $crate::DType::I32 => {
                type $t = i32;
                $body
            }
            $crate::DType::I64 => {
                type $t = i64;
                $body
            }
            $crate::DType::U8 => {
                type $t = u8;
                $body
            }
            $crate::DType::U32 => {
                type $t = u32;
                $body
            }
            $crate::DType::Fp8E4M3Fnuz => {
                type $t = $crate::Fp8E4M3Fnuz;
                $body
            }
            $crate::DType::Fp8E5M2Fnuz => {
                type $t = $crate::Fp8E5M2Fnuz;
                $body
            }
            $crate::DType::Fp8E4M3 => {
                type $t = $crate::Fp8E4M3;
                $body
            }
            $crate::DType::Fp8E5M2 => {
                type $t = $crate::Fp8E5M2;
                $body
            }
            $crate::DType::Fp4x2 => {
                type $t = $crate::Fp4x2;
                $body
            }
            $crate::DType::E8M0 => {
                type $t = $crate::E8M0;
                $body
            }
        }
    };
}

pub(super) use with_element;

/// Conversion of whole tensors.
pub(super) trait Convert: Element {
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
    /// For [`Tolerance::Sum`](super::Tolerance::Sum) and [`Tolerance::Attention`](super::Tolerance::Attention): of each element, what the
    /// sum of its terms' absolute values is at most. Empty: as the elements, and 1 for attention.
    pub magnitudes: Vec<f64>,
    /// How far a result of this call may be from it, where that is not what the operator says of its output.
    pub tolerance: Option<Tolerance>,
}

impl HostTensorF64 {
    /// Stands for an element that the operator does not write, as its documentation says, or that the reference leaves out
    /// ([`Call::limit_reference`](super::Call::limit_reference)). A comparison passes it over.
    pub const UNTOUCHED: f64 = f64::from_bits(0x7ff8_0000_7fff_ffff);

    /// Whether a value of a reference is [`UNTOUCHED`](Self::UNTOUCHED).
    pub const fn is_untouched(value: f64) -> bool {
        value.to_bits() == Self::UNTOUCHED.to_bits()
    }

    /// With these elements, and no magnitudes.
    pub fn new(shape: impl Into<Vec<usize>>, values: Vec<f64>) -> Self {
        Self { shape: shape.into(), values, magnitudes: Vec::new(), tolerance: None }
    }

    /// With magnitudes of sums.
    pub fn with_magnitudes(self, magnitudes: Vec<f64>) -> Self {
        Self { magnitudes, ..self }
    }
}

/// The bytes of outputs before a run: NaN for floats.
pub const POISON: u8 = 0xff;

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

    /// A tensor whose bytes are all [`POISON`]: NaN for floats, so that what an operator fails to write shows.
    ///
    /// # Errors
    /// As [`Stream::alloc_zeroed`].
    pub fn poisoned(stream: &Stream, spec: TensorSpec) -> Result<Self> {
        Self::filled(stream, spec, POISON)
    }

    /// A tensor whose bytes are all `byte`.
    ///
    /// # Errors
    /// As [`Stream::alloc_zeroed`].
    pub fn filled(stream: &Stream, spec: TensorSpec, byte: u8) -> Result<Self> {
        let new = Self::alloc(stream, spec)?;
        stream.fill_bytes(&new.storage, byte)?;
        Ok(new)
    }

    fn alloc(stream: &Stream, spec: TensorSpec) -> Result<Self> {
        let label = format_args!("{} {:?}", spec.dtype, spec.shape);
        Ok(Self { storage: Storage::new(stream, spec.bytes()?, &label)?, spec })
    }

    /// Copies the tensor to the host, after everything queued on `stream`; blocks until it is there.
    ///
    /// # Errors
    /// As [`Stream::download`].
    pub fn download(&self, stream: &Stream) -> Result<HostTensor> {
        const OP: &str = "DynTensor::download";
        self.storage.used_on(OP, "tensor", stream)?;
        let mut bytes = zeroed_on_host(OP, "tensor", self.storage.bytes())?;
        stream.read_bytes(&self.storage, &mut bytes)?;
        Ok(HostTensor { spec: self.spec.clone(), bytes })
    }

    /// The tensor with its static type.
    ///
    /// # Errors
    /// [`Error::DType`], naming `op` and `arg`, for another type than `T`.
    pub fn view<T: Element>(&self, op: &'static str, arg: &'static str) -> Result<TensorView<'_, T>> {
        expect_dtype::<T>(op, arg, self.spec.dtype)?;
        let layout = Layout::contiguous(&self.spec.shape).map_err(|e| e.of_argument(op, arg))?;
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
        let layout = Layout::contiguous(&self.spec.shape).map_err(|e| e.of_argument(op, arg))?;
        TensorViewMut::new(&self.storage, layout.numel(), layout, 0)
    }
}

impl fmt::Debug for DynTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (spec, device) = (&self.spec, self.storage.device());
        write!(f, "DynTensor({} {:?} on {})", spec.dtype, spec.shape, device.spec())
    }
}
