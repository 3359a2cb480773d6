//! The sizes that only a GPU can run in reasonable time.

use super::{CallSpec, Case, Operator, Scalar, TensorSpec};
use crate::{DType, Result};

/// Sizes of an operator that are measured on GPUs: published tables, prefill, more than a GiB. The benches and the peers
/// read them, beside the cases of the operator, which the emulator can run, too.
#[derive(Debug, Clone, Copy)]
pub enum BenchSizes {
    /// Rows by columns: bf16 tensors of `[m, n]` and of `[n]`, and tensors whose shapes stay.
    Rows {
        /// `[m, n]`, one case each.
        shapes: &'static [[usize; 2]],
        /// Tensors of `[m, n]`.
        matrices: &'static [&'static str],
        /// Tensors of `[n]`.
        vectors: &'static [&'static str],
        /// Scalars that differ from their default.
        scalars: &'static [(&'static str, Scalar)],
    },
    /// These cases.
    Cases(&'static [Case]),
    /// The first case of each model, with `rows` on the axis that counts tokens. A tensor of one element stays.
    Tokens {
        /// Tokens.
        rows: usize,
        /// Tensors whose first axis counts them.
        axis0: &'static [&'static str],
        /// Tensors whose second axis counts them.
        axis1: &'static [&'static str],
    },
    /// All of several.
    Several(&'static [BenchSizes]),
}

/// 128 columns, a head and the width of published tables; then widths of models, decode and prefill: Qwen3 30B-A3B,
/// GPT-OSS, Llama-3 8B, DeepSeek-V3, Llama-3 70B.
pub const PUBLISHED_ROWS: &[[usize; 2]] = &[
    [128, 128],
    [4096, 128],
    [16_384, 128],
    [65_536, 128],
    [1, 8192],
    [4096, 2048],
    [4096, 2880],
    [4096, 4096],
    [4096, 7168],
    [4096, 8192],
];

impl BenchSizes {
    /// [`Rows`](Self::Rows) without scalars.
    pub const fn rows(
        shapes: &'static [[usize; 2]],
        matrices: &'static [&'static str],
        vectors: &'static [&'static str],
    ) -> Self {
        Self::Rows { shapes, matrices, vectors, scalars: &[] }
    }
}

impl Operator {
    /// The calls of [`BenchSizes`], each with its label.
    ///
    /// # Errors
    /// As [`spec`](Self::spec).
    pub fn bench_calls(&'static self) -> Result<Vec<(String, CallSpec)>> {
        let mut calls = Vec::new();
        self.add_bench_calls(&self.bench, &mut calls)?;
        Ok(calls)
    }

    fn add_bench_calls(&'static self, sizes: &BenchSizes, calls: &mut Vec<(String, CallSpec)>) -> Result<()> {
        match *sizes {
            BenchSizes::Rows { shapes, matrices, vectors, scalars } => {
                for &[m, n] in shapes {
                    let bf16 = |shape: &[usize]| TensorSpec::new(DType::Bf16, shape);
                    let matrices = matrices.iter().map(|&name| (name, bf16(&[m, n])));
                    let vectors = vectors.iter().map(|&name| (name, bf16(&[n])));
                    calls.push((format!("{m} x {n}"), self.spec_of(matrices.chain(vectors), scalars)?));
                }
            }
            BenchSizes::Cases(cases) => {
                for case in cases {
                    calls.push((case.label.into(), self.spec(case)?));
                }
            }
            BenchSizes::Tokens { rows, axis0, axis1 } => {
                // Cases of one model differ in their tokens alone.
                let mut known = Vec::new();
                for case in self.cases {
                    let resized = |&(name, dtype, shape): &(&'static str, DType, &[usize])| {
                        let mut shape = shape.to_vec();
                        let axis =
                            if axis0.contains(&name) { Some(0) } else { axis1.contains(&name).then_some(1) };
                        if let Some(axis) = axis.filter(|_| shape.iter().product::<usize>() != 1) {
                            shape[axis] = rows;
                        }
                        (name, TensorSpec::new(dtype, shape))
                    };
                    let is_input = |name| self.arg(name).is_some_and(|arg| arg.role.is_input());
                    let inputs = case.tensors.iter().filter(|(name, ..)| is_input(name));
                    let model = (inputs.map(resized).collect::<Vec<_>>(), case.scalars);
                    if known.contains(&model) {
                        continue;
                    }
                    let call = self.spec_of(model.0.clone(), model.1)?;
                    calls.push((format!("{}: {rows} rows", case.label), call));
                    known.push(model);
                }
            }
            BenchSizes::Several(all) => {
                for sizes in all {
                    self.add_bench_calls(sizes, calls)?;
                }
            }
        }
        Ok(())
    }
}
