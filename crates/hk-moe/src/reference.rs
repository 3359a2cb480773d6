//! The operators again, in plain loops.

/// What `moe_align_block_size` gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aligned {
    /// Gates by expert, each expert padded to whole tiles; the number of gates where there is none.
    pub sorted_token_ids: Vec<i32>,
    /// The expert of each tile, -1 past the last.
    pub expert_ids: Vec<i32>,
    /// Length of the tiles together.
    pub num_tokens_post_padded: i32,
}

/// Gates of `topk_ids` by expert, into a list of `len` slots; ids outside `0..experts` are dropped.
pub fn moe_align_block_size(
    topk_ids: &[i32],
    experts: usize,
    block_size: usize,
    expert_map: Option<&[i32]>,
    len: usize,
    tiles: usize,
) -> Aligned {
    let none = topk_ids.len() as i32;
    let (mut sorted, mut expert_ids) = (Vec::new(), Vec::new());
    for expert in 0..experts {
        let gates = topk_ids.iter().enumerate().filter(|(_, id)| **id == expert as i32);
        sorted.extend(gates.map(|(gate, _)| gate as i32));
        sorted.resize(sorted.len().next_multiple_of(block_size), none);
        let local = expert_map.map_or(expert as i32, |map| map[expert].max(-1));
        expert_ids.resize(sorted.len() / block_size, local);
    }
    let padded = sorted.len() as i32;
    sorted.resize(len, none);
    expert_ids.resize(tiles, -1);
    Aligned { sorted_token_ids: sorted, expert_ids, num_tokens_post_padded: padded }
}
