//! Element types that GEMMs take.

use crate::gemm::Precision;
use hk_core::quant::Quantized;
use hk_core::{Element, Float, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, bf16, f16};

pub(crate) mod sealed {
    use super::*;

    pub trait Half: Float {
        const PRECISION: Precision;
    }
    impl Half for bf16 {
        const PRECISION: Precision = Precision::Bf16;
    }
    impl Half for f16 {
        const PRECISION: Precision = Precision::F16;
    }

    pub trait Int8OrFp8: Element + Quantized {
        const PRECISION: Precision;
    }
    impl Int8OrFp8 for i8 {
        const PRECISION: Precision = Precision::I8;
    }
    impl Int8OrFp8 for Fp8E4M3 {
        const PRECISION: Precision = Precision::Fp8;
    }
    impl Int8OrFp8 for Fp8E4M3Fnuz {
        const PRECISION: Precision = Precision::Fp8;
    }
}

/// `bf16` or `f16`.
pub trait Half: sealed::Half {}
impl Half for bf16 {}
impl Half for f16 {}

/// `i8`, or the fp8 of the device's matrix instructions: [`Fp8E4M3Fnuz`] on gfx942, [`Fp8E4M3`] on gfx950 and sm_90.
pub trait Int8OrFp8: sealed::Int8OrFp8 {}
impl Int8OrFp8 for i8 {}
impl Int8OrFp8 for Fp8E4M3 {}
impl Int8OrFp8 for Fp8E4M3Fnuz {}

/// Weights that 16-bit activations can be quantized to: [`Int8OrFp8`] with block scales, [`Fp4x2`] with MX scales.
pub trait PrequantWeight: crate::gemm::Quantizer {}
impl<C: Int8OrFp8> PrequantWeight for C {}
impl PrequantWeight for Fp4x2 {}
