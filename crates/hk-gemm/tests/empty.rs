//! K = 0, and batch invariance.

use hk_core::{Fp4x2, bf16};
use hk_gemm::{
    A16W8Inputs, A16WFp4Inputs, BlockShape, Determinism, Gemm, GemmConfig, GemmOptions, GemmTile, GemmWeight,
    MxScaleView, Prequant, PtgqInputs, batched_gemm_a8w8_ptgq, batched_gemm_bf16, gemm_a16w8_blockscale,
    gemm_a16w16, gemm_a16wfp4,
};
use hk_testkit::{self as kit, Fill, Gpu};

/// Without columns, activations that would be quantized give zeros, with no workspace.
#[test]
fn quantized_activations_without_columns() {
    for spec in ["emu:gfx942", "emu:gfx950"] {
        let gpu = Gpu::open(spec);
        let s = gpu.stream();
        let (m, n) = (70, 64);
        let zeros = vec![0.0f32; m * n];
        let a = gpu.upload::<bf16>(&[], [m, 0]);
        let mut y = gpu.poisoned::<f32>([m, n]);
        let (w, scale) = (gpu.upload::<Fp4x2>(&[], [n, 0]), gpu.upload(&[], [n, 0]));
        let (w, w_scale) = (GemmWeight::Rows(w.view()), MxScaleView::Rows(scale.view()));
        let inputs = A16WFp4Inputs { a: a.view(), w, w_scale };
        gemm_a16wfp4(s, inputs, Prequant::Yes, y.view_mut(), None, GemmOptions::default()).unwrap();
        kit::assert_bits(&gpu.download(&y), &zeros);

        let mut y = gpu.poisoned::<f32>([m, n]);
        let (w, scale) = (gpu.upload::<i8>(&[], [n, 0]), gpu.upload::<f32>(&[], [1, 0]));
        let (w, group) = (w.view().into(), BlockShape::default());
        let inputs = A16W8Inputs { a: a.view(), w, w_scale: scale.view(), group };
        gemm_a16w8_blockscale(s, inputs, Prequant::Yes, y.view_mut(), None, GemmOptions::default()).unwrap();
        kit::assert_bits(&gpu.download(&y), &zeros);

        let mut y = gpu.poisoned::<f32>([1, m, n]);
        let (a, w) = (gpu.upload::<bf16>(&[], [1, m, 0]), gpu.upload::<i8>(&[], [1, n, 0]));
        let scale = gpu.upload(&[1.0f32], [1]);
        let inputs = PtgqInputs { a: a.view(), group: 128, w: w.view().into(), w_scale: scale.view() };
        batched_gemm_a8w8_ptgq(s, inputs, None, y.view_mut(), None, GemmOptions::default()).unwrap();
        kit::assert_bits(&gpu.download(&y), &zeros);
    }
}

/// A forced tile serves K = 0, whatever the strides of rows without elements.
#[test]
fn forced_tiles_without_columns() {
    for spec in ["emu:gfx942", "emu:gfx950"] {
        let gpu = Gpu::open(spec);
        let mut ran = 0;
        for tile in GemmTile::ALL {
            let (a, w) = (gpu.upload::<bf16>(&[], [3, 0]), gpu.upload::<bf16>(&[], [5, 0]));
            let mut y = gpu.poisoned::<f32>([3, 5]);
            let config = Some(GemmConfig { tile, splits: 1, group: 1 });
            let options = GemmOptions { config, ..GemmOptions::default() };
            let answer = gemm_a16w16(gpu.stream(), a.view(), w.view(), None, y.view_mut(), None, options);
            if answer.is_ok() {
                kit::assert_bits(&gpu.download(&y), &[0.0; 15]);
                ran += 1;
            } else {
                // Other operands have a kernel of this tile.
                kit::assert_error(answer, kit::kind!(Argument), &["tile", "one of"]);
            }
        }
        assert!(ran >= 9, "{spec}: {ran} tiles");
    }
}

/// Batch-invariant rows do not depend on M, on the batch, or on the workspace.
#[test]
fn batch_invariance() {
    for spec in ["emu:gfx942", "emu:gfx950"] {
        let gpu = Gpu::open(spec);
        let (batch, n, k) = (24, 64, 2048);
        let rows: Vec<bf16> = kit::floats(&Fill::Normal.elements::<f32>(70 * k, 1));
        let weights: Vec<bf16> = kit::floats(&Fill::Normal.elements::<f32>(n * k, 2));
        let w = gpu.upload(&weights, [n, k]);
        let mut want: Option<Vec<f32>> = None;
        for m in [70, 1, 4, 17, 40] {
            let a = gpu.upload(&rows[..m * k], [m, k]);
            let mut y = gpu.poisoned::<f32>([m, n]);
            let mut space = gpu.poisoned::<f32>([16 * m * n]);
            let gemm = Gemm::new(a.view(), w.view()).determinism(Determinism::BatchInvariant);
            gemm.workspace(space.view_mut()).run(gpu.stream(), y.view_mut()).unwrap();
            let got = gpu.download(&y);
            kit::assert_bits(&got, &want.get_or_insert_with(|| got.data[..m * n].to_vec())[..m * n]);
        }
        let m = 4;
        let a = gpu.upload(&rows[..m * k].repeat(batch), [batch, m, k]);
        let w = gpu.upload(&weights.repeat(batch), [batch, n, k]);
        let mut y = gpu.poisoned::<f32>([batch, m, n]);
        let options = GemmOptions { determinism: Determinism::BatchInvariant, ..GemmOptions::default() };
        batched_gemm_bf16(gpu.stream(), a.view(), w.view(), None, y.view_mut(), None, options).unwrap();
        kit::assert_bits(&gpu.download(&y), &want.unwrap()[..m * n].repeat(batch));
    }
}
