//! Every kernel once under all sanitizers of the emulator.

mod common;

use common::{dense, rmsnorm, widen, with_eps};
use hk_core::{Float, bf16, f16};
use hk_norm::reference;
use hk_testkit::{self as kit, Fill, Place, RowCase, Tolerance};

/// The widest rows of each kernel by vectors; those by elements have some of them.
const WIDEST: [usize; 8] = [128, 512, 1024, 2048, 4096, 8192, 16_384, 16_392];

/// Rows of each width, by vectors and by elements.
fn cases<T: Float>() -> impl Iterator<Item = (RowCase<T>, Place)> {
    WIDEST.into_iter().flat_map(|cols| {
        let c: RowCase<T> = dense(2, cols, Fill::Normal, cols as u64);
        let places = [Place::rows(c.shape(), cols), Place::rows(c.shape(), cols + 1).shifted(1)];
        places.map(|place| (c.clone(), place))
    })
}

/// Runs every kernel of `operator` for each dtype.
fn every_kernel(operator: &str, run: impl Fn()) {
    run();
    for gpu in kit::sanitized_devices() {
        let kernels = gpu.stream().device().loaded_kernels();
        let ran = kernels.iter().filter(|k| k.name().starts_with(&format!("{operator}_"))).count();
        assert_eq!(ran, 3 * 12, "dtypes times variants on {}", gpu.spec());
    }
}

fn run_rmsnorm<T: Float>() {
    for (c, place) in cases::<T>() {
        let want = reference::rmsnorm::<T>(&widen(&c.x), &widen(&c.w), with_eps(1e-6));
        for gpu in kit::sanitized_devices() {
            let (x, weight) = (gpu.upload(&c.x, &place), gpu.upload(&c.w, [c.cols]));
            let got = rmsnorm(&gpu, &x, &weight, &place, with_eps(1e-6));
            kit::assert_close(&got.y, &want.y, Tolerance::Reduction);
        }
    }
}

fn run_fused_add_rmsnorm<T: Float>() {
    for (c, place) in cases::<T>() {
        let residual = c.matrix(1);
        let (x, r, w) = (widen(&c.x), widen(&residual), widen(&c.w));
        let want = reference::fused_add_rmsnorm::<T>(&x, &r, &w, with_eps(1e-6));
        for gpu in kit::sanitized_devices() {
            let (x, r) = (gpu.upload(&c.x, &place), gpu.upload(&residual, &place));
            let weight = gpu.upload(&c.w, [c.cols]);
            let (mut y, mut out) = (gpu.poisoned::<T>(&place), gpu.poisoned::<T>(&place));
            let (xv, rv, wv, yv) = (x.view(), r.view(), weight.view(), y.view_mut());
            hk_norm::fused_add_rmsnorm(gpu.stream(), xv, rv, wv, yv, out.view_mut(), None, with_eps(1e-6))
                .unwrap();
            kit::assert_close(&gpu.download(&out), &want.residual_out, Tolerance::Exact);
            kit::assert_close(&gpu.download(&y), &want.y, Tolerance::Reduction);
        }
    }
}

#[test]
fn rmsnorm_has_no_finding() {
    every_kernel("rmsnorm", || {
        run_rmsnorm::<bf16>();
        run_rmsnorm::<f16>();
        run_rmsnorm::<f32>();
    });
}

#[test]
fn fused_add_rmsnorm_has_no_finding() {
    every_kernel("fused_add_rmsnorm", || {
        run_fused_add_rmsnorm::<bf16>();
        run_fused_add_rmsnorm::<f16>();
        run_fused_add_rmsnorm::<f32>();
    });
}
