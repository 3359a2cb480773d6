//! The sizes of a call, checked.

use crate::StateLayout;
use hk_core::{Error, Result};

/// Head sizes that the kernels serve.
const MOST_DIM: usize = 256;

/// The shapes of a call.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Shapes<'s> {
    pub op: &'static str,
    /// Of q and v, if these are others.
    pub names: Option<[&'static str; 2]>,
    pub layout: StateLayout,
    pub q: &'s [usize],
    pub k: &'s [usize],
    pub v: &'s [usize],
    pub cu_seqlens: Option<&'s [usize]>,
    pub g: Option<&'s [usize]>,
    pub gk: Option<&'s [usize]>,
    pub gv: Option<&'s [usize]>,
    pub beta: Option<&'s [usize]>,
    pub a: Option<&'s [usize]>,
    pub b: Option<&'s [usize]>,
    pub a_log: Option<&'s [usize]>,
    pub dt_bias: Option<&'s [usize]>,
    pub initial_state: Option<&'s [usize]>,
    pub state_pool: Option<&'s [usize]>,
    pub state_indices: Option<&'s [usize]>,
    pub num_accepted_tokens: Option<&'s [usize]>,
}

/// Sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub sequences: usize,
    /// Of each sequence, or of all packed ones.
    pub tokens: usize,
    pub k_heads: usize,
    pub v_heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    pub beta_of_v: bool,
    pub a_of_k: bool,
    pub n_slots: usize,
    /// States of a sequence.
    pub slot_cols: usize,
    /// Writes a state for each token.
    pub each_token: bool,
}

impl Sizes {
    /// The axes of a state after the first one.
    pub fn state(&self, layout: StateLayout) -> [usize; 3] {
        match layout {
            StateLayout::Kv => [self.v_heads, self.k_dim, self.v_dim],
            StateLayout::Vk => [self.v_heads, self.v_dim, self.k_dim],
        }
    }
}

impl Shapes<'_> {
    /// # Errors
    /// [`Error::Shape`], [`Error::Unsupported`] and [`Error::Argument`], naming the tensor.
    pub fn check(&self) -> Result<Sizes> {
        let op = self.op;
        let packed = self.cu_seqlens.is_some();
        let rank = if packed { 3 } else { 4 };
        let axes = if packed { "[T, heads, dim] (packed by cu_seqlens)" } else { "[B, T, heads, dim]" };
        let [q, v] = self.names.unwrap_or(["q", "v"]);
        for (arg, shape) in [(q, self.q), ("k", self.k), (v, self.v)] {
            if shape.len() != rank {
                return Err(Error::shape(op, arg, shape, format!("{rank} axes: {axes}")));
            }
        }
        let (rows, last) = self.q.split_at(rank - 2);
        let (k_heads, k_dim) = (last[0], last[1]);
        let (v_heads, v_dim) = (self.v[rank - 2], self.v[rank - 1]);
        if self.k != self.q {
            return Err(Error::shape(op, "k", self.k, format!("{:?} (shape of {q})", self.q)));
        }
        if &self.v[..rank - 2] != rows {
            return Err(Error::shape(op, v, self.v, format!("{rows:?} and [v_heads, V] (tokens of {q})")));
        }
        if k_heads == 0 || v_heads == 0 || !v_heads.is_multiple_of(k_heads) {
            let want = format!("a positive multiple of {k_heads} heads (those of k)");
            return Err(Error::shape(op, v, self.v, want));
        }
        for (arg, dim) in [("K", k_dim), ("V", v_dim)] {
            if !(1..=MOST_DIM).contains(&dim) {
                let what = format!("{arg} = {dim}");
                return Err(Error::unsupported(op, what, format!("heads have 1 to {MOST_DIM} elements")));
            }
        }
        let sequences = match self.cu_seqlens {
            None => rows[0],
            Some(&[n]) if n > 0 => n - 1,
            Some(shape) => {
                return Err(Error::shape(op, "cu_seqlens", shape, "[N + 1], at least one element"));
            }
        };
        let tokens = rows[rows.len() - 1];

        let per_head = [rows, &[v_heads]].concat();
        let with = |dim| [&per_head[..], &[dim]].concat();
        for (arg, shape, want) in
            [("g", self.g, per_head.clone()), ("gk", self.gk, with(k_dim)), ("gv", self.gv, with(v_dim))]
        {
            if let Some(shape) = shape.filter(|shape| *shape != want) {
                return Err(Error::shape(op, arg, shape, format!("{want:?}")));
            }
        }
        let beta_of_v = match self.beta {
            Some(shape) if shape == with(v_dim) => true,
            Some(shape) if shape != per_head => {
                let want = format!("{per_head:?} or {:?}", with(v_dim));
                return Err(Error::shape(op, "beta", shape, want));
            }
            _ => false,
        };
        // Together, or none of them.
        let a_of_k = self.a.is_some_and(|shape| shape.len() == rank);
        let heads = if a_of_k { vec![v_heads, k_dim] } else { vec![v_heads] };
        for (arg, shape, want) in [
            ("a", self.a, if a_of_k { with(k_dim) } else { per_head.clone() }),
            ("b", self.b, per_head.clone()),
            ("A_log", self.a_log, vec![v_heads]),
            ("dt_bias", self.dt_bias, heads),
        ] {
            if let Some(shape) = shape.filter(|shape| *shape != want) {
                return Err(Error::shape(op, arg, shape, format!("{want:?}")));
            }
        }
        let mut sizes = Sizes {
            sequences,
            tokens,
            k_heads,
            v_heads,
            k_dim,
            v_dim,
            beta_of_v,
            a_of_k,
            n_slots: 0,
            slot_cols: 1,
            each_token: false,
        };
        self.check_states(&mut sizes)?;
        Ok(sizes)
    }

    fn check_states(&self, sizes: &mut Sizes) -> Result<()> {
        let op = self.op;
        let state = sizes.state(self.layout);
        if let Some(initial) = self.initial_state {
            let want = [&[sizes.sequences], &state[..]].concat();
            if initial != want {
                let want = format!("{want:?} (sequences and state)");
                return Err(Error::shape(op, "initial_state", initial, want));
            }
        }
        let Some(pool) = self.state_pool else {
            for (arg, given) in
                [("state_indices", self.state_indices), ("num_accepted_tokens", self.num_accepted_tokens)]
            {
                if given.is_some() {
                    return Err(Error::argument(op, arg, "given", "nothing without state_pool"));
                }
            }
            return Ok(());
        };
        if self.initial_state.is_some() {
            return Err(Error::argument(op, "initial_state", "given", "nothing beside state_pool"));
        }
        if pool.len() != 4 || pool[1..] != state {
            return Err(Error::shape(op, "state_pool", pool, format!("slots and {state:?}")));
        }
        sizes.n_slots = pool[0];
        let Some(indices) = self.state_indices else {
            return Err(Error::argument(op, "state_indices", "no tensor", "a tensor, beside state_pool"));
        };
        match *indices {
            [n] if n == sizes.sequences => {}
            [n, cols] if n == sizes.sequences && cols > 0 => {
                sizes.each_token = true;
                sizes.slot_cols = cols;
            }
            _ => {
                let want = format!("[{0}] or [{0}, states] (sequences)", sizes.sequences);
                return Err(Error::shape(op, "state_indices", indices, want));
            }
        }
        if let Some(accepted) = self.num_accepted_tokens {
            if !sizes.each_token {
                let want = "nothing beside state_indices of one state a sequence";
                return Err(Error::argument(op, "num_accepted_tokens", "given", want));
            }
            if accepted != [sizes.sequences] {
                let want = format!("[{}] (sequences)", sizes.sequences);
                return Err(Error::shape(op, "num_accepted_tokens", accepted, want));
            }
        }
        Ok(())
    }
}
