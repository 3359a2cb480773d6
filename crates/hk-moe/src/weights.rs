//! The rows of `w1` and `w3` of a checkpoint in the orders of gated expert GEMMs, on the host.

use crate::GateOrder;
use hk_core::{Error, Result};

/// One matrix `[E, 2 I, columns]` of gates `w1` and values `w3` `[E, I, columns]`, as the `w1` of [`fused_moe`](crate::fused_moe()) and
/// gated expert GEMMs have them.
///
/// For everything that has a row for each row of weights: weights themselves (`columns`: elements of `T` of a row, of packed types
/// bytes), biases and f32 scales of rows (1), e8m0 scales (`K / 32`), scales and int8 zero points of groups (`K / group`). Scales of 128
/// by 128 blocks have `ceil(K / 128)` columns and are in halves only, where 128 divides `I`: a block of neighbouring gates and values has
/// no scale of its own. For [`GemmWeight::Shuffled`](crate::GemmWeight::Shuffled) [`shuffle_weight_host`](crate::shuffle_weight_host) takes
/// the result, a matrix at a time.
///
/// # Errors
/// [`Argument`](Error::Argument) for lengths that differ, or that are not `experts` matrices of whole rows.
pub fn join_gates_host<T: Copy>(
    w1: &[T],
    w3: &[T],
    [experts, columns]: [usize; 2],
    order: GateOrder,
) -> Result<Vec<T>> {
    const OP: &str = "join_gates_host";
    if w1.len() != w3.len() {
        return Err(Error::argument(
            OP,
            "w3",
            format!("{} elements", w3.len()),
            format!("{} as w1", w1.len()),
        ));
    }
    let matrix = whole_rows(OP, "w1", w1.len(), [experts, columns])?;
    let mut all = Vec::with_capacity(2 * w1.len());
    for (gates, values) in w1.chunks(matrix.max(1)).zip(w3.chunks(matrix.max(1))) {
        match order {
            GateOrder::Halves => {
                all.extend_from_slice(gates);
                all.extend_from_slice(values);
            }
            GateOrder::Pairs => {
                for (gate, value) in gates.chunks(columns).zip(values.chunks(columns)) {
                    all.extend_from_slice(gate);
                    all.extend_from_slice(value);
                }
            }
        }
    }
    Ok(all)
}

/// The inverse of [`join_gates_host`]: gates, and values. With it a checkpoint in one order is brought to the other.
///
/// # Errors
/// [`Argument`](Error::Argument) for a length that is not `experts` matrices of an even number of rows.
pub fn split_gates_host<T: Copy>(
    joined: &[T],
    [experts, columns]: [usize; 2],
    order: GateOrder,
) -> Result<[Vec<T>; 2]> {
    const OP: &str = "split_gates_host";
    // A row of gates and a row of values at a time.
    let matrix = whole_rows(OP, "joined", joined.len(), [experts, columns.saturating_mul(2)])?;
    let part = match order {
        GateOrder::Halves => matrix / 2,
        GateOrder::Pairs => columns,
    };
    let [mut w1, mut w3] = [0; 2].map(|_| Vec::with_capacity(joined.len() / 2));
    for (i, rows) in joined.chunks(part.max(1)).enumerate() {
        if i % 2 == 0 { w1.extend_from_slice(rows) } else { w3.extend_from_slice(rows) }
    }
    Ok([w1, w3])
}

/// Elements of a matrix.
fn whole_rows(op: &'static str, arg: &'static str, len: usize, [experts, row]: [usize; 2]) -> Result<usize> {
    let all = experts.saturating_mul(row);
    if all == 0 || !len.is_multiple_of(all) {
        let want = format!("{experts} matrices of rows of {row}");
        return Err(Error::argument(op, arg, format!("{len} elements"), want));
    }
    Ok(len / experts)
}
