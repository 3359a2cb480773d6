//! Checks `rmsnorm` on a tensor of more than 2^31 elements, and with row strides so large that a few rows span more than
//! 4 GiB, on the device that `HK_DEVICE` names. Needs 7 GB of memory there and 9 GB on the host; 13 GB in all on the
//! emulator.

use hk_core::{Device, Layout, Result, Stream, bf16};
use hk_norm::{RmsNormOptions, reference, rmsnorm};

/// More elements than 2^31 in rows of 8200: the value of row `r`, column `c`, depends on `(r % 7, c)`.
const ROWS: usize = 262_208;
const COLS: usize = 8200;

fn main() -> Result<()> {
    let device = Device::open_default()?;
    println!("{}", device.info().name);
    let stream = device.create_stream()?;
    many_elements(&stream)?;
    wide_strides(&stream)
}

fn value(row: usize, col: usize) -> bf16 {
    bf16::from_f32(((row % 7 * 13 + col * 31) % 255) as f32 / 32.0 - 4.0)
}

fn many_elements(stream: &Stream) -> Result<()> {
    let options = RmsNormOptions::default();
    let period: Vec<bf16> = (0..7 * COLS).map(|i| value(i / COLS, i % COLS)).collect();
    let x: Vec<bf16> = period.iter().copied().cycle().take(ROWS * COLS).collect();
    let mut x = stream.upload(&x)?;
    let weight = stream.upload(&vec![1.0f32; COLS])?;
    let y = x.view_mut([ROWS, COLS])?;
    rmsnorm(stream, y.alias(), weight.view([COLS])?, y, options)?;
    let y = stream.download(&x)?;

    let wide: Vec<f64> = period.iter().map(|v| f64::from(v.to_f32())).collect();
    let want = reference::rmsnorm::<bf16>(&wide, &vec![1.0; COLS], options).y;
    for (got, want) in y.iter().zip(&want) {
        assert!((f64::from(got.to_f32()) - want).abs() <= 8e-3 * want.abs() + 1e-5, "{got} for {want}");
    }
    let same = y.chunks(7 * COLS).all(|part| *part == y[..part.len()]);
    assert!(same, "rows of the same values have different results");
    println!("rmsnorm {ROWS} x {COLS} bf16, in place: right");
    Ok(())
}

fn wide_strides(stream: &Stream) -> Result<()> {
    const STRIDE: usize = 1 << 30;
    const ROWS: usize = 4;
    for cols in [128, 4096] {
        let layout = Layout::with_strides([ROWS, cols], [STRIDE, 1])?;
        let mut x = stream.alloc_zeroed::<bf16>(layout.span())?;
        stream.fill(&mut x, bf16::from_f32(3.0))?;
        let weight = stream.upload(&vec![1.5f32; cols])?;
        let y = x.view_mut_with(layout, 0)?;
        rmsnorm(stream, y.alias(), weight.view([cols])?, y, RmsNormOptions::default())?;
        let y = stream.download(&x)?;
        for row in 0..ROWS {
            let at = row * STRIDE;
            assert!(y[at..at + cols].iter().all(|v| v.to_f32() == 1.5), "row {row} is wrong");
            let after = y.get(at + cols..at + STRIDE).unwrap_or(&[]);
            assert!(after.iter().all(|v| v.to_f32() == 3.0), "something behind row {row} is overwritten");
        }
        println!("rmsnorm {ROWS} x {cols} bf16, rows 2^30 elements apart: right");
    }
    Ok(())
}
