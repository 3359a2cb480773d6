//! The operators as data.

use hk_gdr::OPERATORS;
use hk_testkit::assert_references_refuse_alike;

#[test]
fn references_refuse_what_operators_refuse() {
    // All operators, so that one run names every difference.
    let refused = OPERATORS
        .iter()
        .filter_map(|op| std::panic::catch_unwind(|| assert_references_refuse_alike(op)).err());
    let all: Vec<_> = refused.map(|e| e.downcast_ref::<String>().cloned().unwrap_or_default()).collect();
    assert!(all.is_empty(), "{}", all.join("\n"));
}
