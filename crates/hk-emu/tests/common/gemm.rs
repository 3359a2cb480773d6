//! A GEMM of two row-major matrices, the second one transposed, by the kernels of `kernels/gemm.hip`.

use super::{Args, Random, Rig, hip};
use hk_emu::{Counters, Fault, Machine, MachineOptions, Module};

/// The kernels of a target.
pub fn kernels(cpu: &str) -> &'static [&'static str] {
    let all = &["gemm_bf16", "gemm_fp8", "gemm_bf16_dma", "gemm_fp8_dma", "gemm_f8f6f4", "gemm_f8f6f4_dma"];
    if cpu == "gfx950" { all } else { &all[..4] }
}

/// The compiled kernels.
pub fn image(cpu: &str) -> Vec<u8> {
    hip(cpu, "-O3", include_str!("../kernels/gemm.hip"))
}

/// Matrices on a device.
pub struct Gemm {
    rig: Rig,
    kernel: &'static str,
    size: [usize; 3],
    /// The values of A and B.
    values: [Vec<f64>; 2],
    buffers: [u64; 3],
}

impl Gemm {
    /// Random matrices for a kernel; `m, n, k` elements.
    pub fn new(
        cpu: &str,
        image: &[u8],
        kernel: &'static str,
        size: [usize; 3],
        options: MachineOptions,
    ) -> Gemm {
        let [m, n, k] = size;
        let rig = Rig::new(options, image);
        let bf16 = kernel.contains("bf16");
        let bias = if cpu == "gfx942" { 8 } else { 7 };
        let mut random = Random(42);
        let mut values = [vec![], vec![]];
        let mut buffers = [0; 3];
        for (o, rows) in [m, n].into_iter().enumerate() {
            let mut bytes = Vec::with_capacity(rows * k * 2);
            for _ in 0..rows * k {
                if bf16 {
                    let bits = random.unit().to_bits() >> 16;
                    bytes.extend((bits as u16).to_le_bytes());
                    values[o].push(f64::from(f32::from_bits(bits << 16)));
                } else {
                    // Subnormals to 1, of either sign.
                    let code = random.next() & 0x80 | (random.next() % (bias << 3)) | 1;
                    bytes.push(code as u8);
                    let (e, fraction) = ((code >> 3 & 15) as i32, f64::from(code & 7) / 8.0);
                    let v = if e == 0 {
                        fraction * 2f64.powi(1 - bias as i32)
                    } else {
                        (1.0 + fraction) * 2f64.powi(e - bias as i32)
                    };
                    values[o].push(if code & 0x80 != 0 { -v } else { v });
                }
            }
            buffers[o] = rig.upload(["a", "b"][o], &bytes);
        }
        buffers[2] = rig.upload("d", &vec![f32::NAN; m * n]);
        Gemm { rig, kernel, size, values, buffers }
    }

    /// One launch that works.
    pub fn run(&self) -> Counters {
        self.launch().expect("the product runs")
    }

    /// One launch.
    pub fn launch(&self) -> Result<Counters, Fault> {
        let [m, n, k] = self.size;
        let bytes = k * if self.kernel.contains("bf16") { 2 } else { 1 };
        let [a, b, d] = self.buffers;
        let args = Args::new().push(a).push(b).push(d).push(n as u32).push(bytes as u32);
        self.rig.launch(self.kernel, (m / 128 * n / 128) as u32, 256, &args)
    }

    /// The device and the kernels.
    pub fn device(&self) -> (&Machine, &Module) {
        (&self.rig.machine, &self.rig.module)
    }

    /// Compares one element in `step` with sums in f64.
    pub fn check(&self, step: usize) {
        let [m, n, k] = self.size;
        let d: Vec<f32> = self.rig.download(self.buffers[2], m * n);
        for at in (0..m * n).step_by(step) {
            let row = |o: usize, r: usize| &self.values[o][r * k..(r + 1) * k];
            let products = || row(0, at / n).iter().zip(row(1, at % n)).map(|(x, y)| x * y);
            let (want, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
            let error = (f64::from(d[at]) - want).abs();
            // A rounding of half a unit for each addition, at the most.
            assert!(
                error <= size * k as f64 * 2f64.powi(-24),
                "{} ({}, {}): {} {want}",
                self.kernel,
                at / n,
                at % n,
                d[at]
            );
        }
    }
}
