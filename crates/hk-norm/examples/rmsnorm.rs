//! RMS normalisation of two rows, on the device that `HK_DEVICE` names (`emu:gfx942`, `hip:0`, ...).

use hk_core::{Device, Result, bf16};
use hk_norm::{RmsNormOptions, rmsnorm};

fn main() -> Result<()> {
    let stream = Device::open_default()?.create_stream()?;
    let x = stream.upload(&[3.0, 4.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0].map(bf16::from_f32))?;
    let weight = stream.upload(&[1.0f32, 1.0, 1.0, 2.0])?;
    let mut y = stream.alloc_zeroed::<bf16>(8)?;
    let options = RmsNormOptions { eps: 1e-6, ..Default::default() };
    rmsnorm(&stream, x.view([2, 4])?, weight.view([4])?, y.view_mut([2, 4])?, options)?;
    println!("{:?}", stream.download(&y)?); // [1.2, 1.6, 0, 0], [1, 1, 1, 2], as near as bf16 is
    Ok(())
}
