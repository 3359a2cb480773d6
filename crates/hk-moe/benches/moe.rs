//! Times of the operators at sizes of real models: see [`hk_testkit::bench`].

fn main() {
    hk_testkit::bench::operators(hk_moe::OPERATORS);
}
