//! Orders of gates and values.

use hk_moe::{GateOrder, join_gates_host, split_gates_host};
use hk_testkit::kind;

#[test]
fn gates_and_values_are_where_kernels_look_for_them() {
    // Two experts of three gates, two columns.
    let w1: Vec<u32> = (0..12).collect();
    let w3: Vec<u32> = (100..112).collect();
    let halves = join_gates_host(&w1, &w3, [2, 2], GateOrder::Halves).unwrap();
    assert_eq!(halves[..12], [0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105]);
    assert_eq!(halves[12..], [6, 7, 8, 9, 10, 11, 106, 107, 108, 109, 110, 111]);
    let pairs = join_gates_host(&w1, &w3, [2, 2], GateOrder::Pairs).unwrap();
    assert_eq!(pairs[..12], [0, 1, 100, 101, 2, 3, 102, 103, 4, 5, 104, 105]);
    assert_eq!(pairs[12..], [6, 7, 106, 107, 8, 9, 108, 109, 10, 11, 110, 111]);
    for (joined, order) in [(halves, GateOrder::Halves), (pairs, GateOrder::Pairs)] {
        assert_eq!(split_gates_host(&joined, [2, 2], order).unwrap(), [w1.clone(), w3.clone()]);
    }
    // Biases have a column, and no experts' worth of rows none at all.
    assert_eq!(join_gates_host(&[1, 2], &[3, 4], [1, 1], GateOrder::Pairs).unwrap(), [1, 3, 2, 4]);
    assert_eq!(join_gates_host::<u8>(&[], &[], [4, 3], GateOrder::Halves).unwrap(), [0u8; 0]);
}

#[test]
fn rows_that_are_not_whole_are_refused() {
    let refused = |result: hk_core::Result<Vec<u8>>, arg: &str| {
        let error = result.unwrap_err();
        let is_argument: fn(&hk_core::Error) -> bool = kind!(Argument);
        assert!(is_argument(&error) && error.to_string().contains(arg), "{error}");
    };
    refused(join_gates_host(&[0; 4], &[0; 6], [1, 2], GateOrder::Halves), "join_gates_host: w3");
    refused(join_gates_host(&[0; 6], &[0; 6], [2, 2], GateOrder::Halves), "join_gates_host: w1");
    refused(join_gates_host(&[0; 6], &[0; 6], [0, 2], GateOrder::Pairs), "join_gates_host: w1");
    for order in [GateOrder::Halves, GateOrder::Pairs] {
        let odd = split_gates_host(&[0u8; 6], [1, 2], order).map(|[w1, _]| w1);
        refused(odd, "split_gates_host: joined");
    }
}
