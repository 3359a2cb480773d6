//! Times of the operators at sizes of real models: see [`hk_testkit::bench`].

use criterion::{Criterion, criterion_group, criterion_main};

fn operators(c: &mut Criterion) {
    hk_testkit::bench::operators(c, hk_gemm::OPERATORS);
}

criterion_group!(benches, operators);
criterion_main!(benches);
