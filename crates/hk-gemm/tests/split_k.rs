//! Split-K slices that meet in one launch.

use crate::common::{Form, Inputs, Operand, devices, tiles};
use crate::for_each_operand;
use hk_core::bf16;
use hk_gemm::{GemmConfig, GemmOptions, GemmTile, gemm_a16w16};
use hk_testkit as kit;

/// The last block of a tile to arrive sums to the bits of a second launch, whatever the workspace holds: scales are powers of two, so that
/// it does not matter which launch applies them. Each tile has one of the shapes, and one of the counts of slices.
fn one_launch_has_the_bits_of_two<T: Operand>() {
    let mut at = 0;
    for (gpu, &form) in devices::<T>().iter().flat_map(|gpu| T::FORMS.iter().map(move |form| (gpu, form))) {
        for tile in tiles(form) {
            let [m, n] = [[1, 40], [33, 77], [70, 140]][at % 3];
            let splits = [2, 5, 9][at / 3 % 3];
            at += 1;
            let how = GemmConfig { tile, splits, group: 3 };
            let rows = if form == Form::Gated { 2 * n } else { n };
            if how.workspace(gpu.stream().device().info(), [1, m, rows]) == splits * m * rows {
                continue; // These slices never meet.
            }
            let bytes = splits * 2048 + 48;
            let mut case = Inputs::<T>::new(form, [2, m, n, bytes / size_of::<T>()], at as u64);
            for scale in case.a_scale.iter_mut().chain(&mut case.w_scale) {
                *scale = 2.0_f32.powi(scale.log2().round() as i32);
            }
            // Sums of small integers are exact, as i32 and as f32.
            for x in case.a.iter_mut().chain(&mut case.w) {
                if T::SCALED {
                    *x = T::near((x.value() as f32).clamp(-4.0, 4.0).round());
                }
            }
            let two = Inputs { short: true, ..case.clone() }.run::<f32>(gpu, Some(how));
            kit::assert_bits(&case.run::<f32>(gpu, Some(how)), &two);
        }
    }
}

for_each_operand!(one_launch_has_the_bits_of_two);

/// Flags are left at zero, and a graph that is launched again meets again.
#[test]
fn graphs_meet_again() {
    let [m, n, k] = [40, 100, 2048];
    let case = Inputs::<bf16>::new(Form::Plain, [1, m, n, k], 3);
    let other = Inputs::<bf16>::new(Form::Plain, [1, m, n, k], 4);
    for gpu in devices::<bf16>() {
        let stream = gpu.stream();
        for tile in [GemmTile::T64x64, GemmTile::S32x32] {
            let config = GemmConfig { tile, splits: 4, group: 1 };
            let options = GemmOptions { config: Some(config), ..GemmOptions::default() };
            let (mut a, w) = (stream.upload(&case.a).unwrap(), stream.upload(&case.w).unwrap());
            let mut y = stream.alloc_zeroed::<f32>(m * n).unwrap();
            let room = config.workspace(stream.device().info(), [1, m, n]);
            let mut space = stream.upload(&vec![f32::NAN; room]).unwrap();
            let mut call = || {
                let (a, w) = (a.view([m, k])?, w.view([n, k])?);
                let workspace = Some(space.view_mut([room])?);
                gemm_a16w16(stream, a, w, None, y.view_mut([m, n])?, workspace, options)
            };
            call().unwrap();
            let graph = stream.capture(call).unwrap();
            for of in [&case, &other, &case] {
                stream.copy(&stream.upload(&of.a).unwrap(), &mut a).unwrap();
                // SAFETY: all tensors are alive, and only this thread uses them.
                unsafe { graph.launch(stream).unwrap() };
                let want = Inputs { w: case.w.clone(), ..of.clone() }.run::<f32>(&gpu, Some(config));
                let got: Vec<u32> = stream.download(&y).unwrap().iter().map(|y| y.to_bits()).collect();
                let want: Vec<u32> = want.data.iter().map(|y| y.to_bits()).collect();
                assert_eq!(got, want, "{tile:?} on {}", gpu.spec());
                if stream.device().arch().is_amd() {
                    let tiles = m.div_ceil(tile.shape().0) * n.div_ceil(tile.shape().1);
                    let flags = &stream.download(&space).unwrap()[room - 2 * 4 * tiles..];
                    assert!(flags.iter().all(|flag| flag.to_bits() == 0), "{tile:?} on {}", gpu.spec());
                }
            }
        }
    }
}
