//! How the work of `lean_atten` and `lean_atten_paged` is shared among blocks: the kernels of `hip/lean.h`.

use super::plan::{AttentionProblem, DenseKeys, dense_rows, floats_per_row};
use super::problem::Problem;
use crate::kernels::attention::Params;
use hk_core::{Arch, DType, DeviceInfo, Error, KernelRef, LaunchConfig, Result, TensorViewMut};

/// Fewest keys of a tile of rows that is worth its partial results.
const FEWEST_KEYS: usize = 256;

/// Tiles of rows of a resident block, for which blocks of a tile each are as good.
const MANY_TILES: usize = 4;

/// Keys of a unit, at least.
const KEYS_OF_UNIT: usize = 32;

/// Most programs of a call.
const MOST_PROGRAMS: usize = 1 << 16;

/// Most units of a list.
const MOST_UNITS: usize = i32::MAX as usize;

/// Elements of a program's entry in the workspace: `attention::lean::Start`.
const START: usize = 8;

/// How many blocks share the work of [`lean_atten`](crate::lean_atten) and [`lean_atten_paged`](crate::lean_atten_paged).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Programs {
    /// As many as are resident on the device at once, fewer if there are few keys. For `lean_atten` a block for each tile of rows, without
    /// partial results, where these are many, or have few keys, or there is no workspace.
    #[default]
    Auto,
    /// So many, from 1 to 65536.
    Count(usize),
}

/// A kernel of stream-K, the rows of its tiles and its blocks that a CU holds.
#[derive(Debug, Clone, Copy)]
struct Shape {
    rows: usize,
    resident: usize,
}

/// How the list is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Division {
    programs: usize,
    /// Of a tile of rows: those that there are.
    rows: usize,
}

/// The sizes that the list follows from.
#[derive(Debug, Clone, Copy)]
struct List {
    sequences: usize,
    kv_heads: usize,
    /// Queries of a sequence by heads of a group.
    rows: usize,
    /// Of all sequences.
    keys: usize,
    /// A block for each tile of rows would find its keys: not those in pages.
    tiles_alone: bool,
}

impl Division {
    /// `None`: a block for each tile of rows.
    fn of(info: &DeviceInfo, shape: Shape, programs: Programs, list: List) -> Option<Self> {
        let rows = shape.rows.min(list.rows);
        let programs = match programs {
            Programs::Count(programs) => programs,
            Programs::Auto => {
                let of_keys = list.rows.div_ceil(shape.rows).saturating_mul(list.kv_heads);
                let (tiles, keys) =
                    (of_keys.saturating_mul(list.sequences), of_keys.saturating_mul(list.keys));
                let resident = info.compute_units as usize * shape.resident;
                let programs = resident.min(keys / FEWEST_KEYS);
                let of_tiles = programs <= tiles && (programs < resident || tiles == resident);
                let too_many = tiles >= MANY_TILES * resident || list.units(shape) > MOST_UNITS;
                if list.tiles_alone && (of_tiles || too_many) {
                    return None;
                }
                programs.max(1)
            }
        };
        Some(Self { programs, rows })
    }

    /// Elements of the workspace: partial results of two tiles for each program, and where it starts.
    fn workspace(self, dv: usize) -> usize {
        let of_program = self.rows.saturating_mul(2 * floats_per_row(dv)).saturating_add(START);
        if self.programs <= 1 { 0 } else { self.programs.saturating_mul(of_program) }
    }
}

impl List {
    /// Units, at most.
    fn units(self, shape: Shape) -> usize {
        let of_tile = self.keys / KEYS_OF_UNIT + self.sequences;
        self.rows.div_ceil(shape.rows).saturating_mul(of_tile).saturating_mul(self.kv_heads)
    }
}

/// The shape of the dense kernel for so many rows, and whether its tiles are tall.
fn dense_shape(arch: Arch, keys: DenseKeys, dv: usize, rows: usize) -> (Shape, bool) {
    let [tall, short] = dense_rows(arch, keys, dv);
    let paged = keys == DenseKeys::Paged;
    if dv > 128 {
        // Of 256 columns a block has all LDS of gfx942.
        return (Shape { rows: tall, resident: if arch == Arch::Gfx950 && !paged { 2 } else { 1 } }, true);
    }
    if rows > short && !paged {
        (Shape { rows: tall, resident: 1 }, true)
    } else {
        (Shape { rows: short, resident: 2 }, false)
    }
}

const GENERAL_SHAPE: Shape = Shape { rows: 128, resident: 1 };

/// Elements of the `f32` workspace of [`lean_atten`](crate::lean_atten): room for the partial results of tiles of rows that several
/// programs share. 0: it needs none.
///
/// [`keys`](AttentionProblem::keys) are those of all sequences here, the rows of `k`.
pub fn lean_workspace(info: &DeviceInfo, problem: &AttentionProblem, programs: Programs) -> usize {
    workspace_of(info, problem, programs, DenseKeys::Fresh)
}

/// The same of [`lean_atten_paged`](crate::lean_atten_paged). [`keys`](AttentionProblem::keys) are the slots of all pages of a row of the
/// block table.
pub fn lean_paged_workspace(info: &DeviceInfo, problem: &AttentionProblem, programs: Programs) -> usize {
    workspace_of(info, problem, programs, DenseKeys::Paged)
}

fn workspace_of(info: &DeviceInfo, problem: &AttentionProblem, programs: Programs, of: DenseKeys) -> usize {
    let AttentionProblem { sequences, heads, kv_heads, queries, keys, dv } = *problem;
    let of_sequence = queries.checked_div(sequences).unwrap_or(0);
    let rows = of_sequence.saturating_mul(heads / kv_heads.max(1));
    let list = List { sequences, kv_heads, rows, keys, tiles_alone: of == DenseKeys::Fresh };
    if list.rows == 0 {
        return 0;
    }
    // Which kernel serves the call depends on strides, too.
    let all = [dense_shape(info.arch, of, dv, list.rows).0, GENERAL_SHAPE];
    let workspace =
        |shape| Division::of(info, shape, programs, list).map_or(0, |division| division.workspace(dv));
    all.into_iter().map(workspace).max().unwrap_or(0)
}

macro_rules! dense {
    ($type:literal) => {
        [
            ([64, 64], dense!(($type) "64" "64_small")),
            ([128, 128], dense!(($type) "128" "128_small")),
            ([192, 128], dense!(($type) "192_128" "192_128_small")),
            ([256, 256], dense!(($type) "256" "256")),
        ]
    };
    (($($type:literal),*) $tall:literal $short:literal) => {
        [
            Params::kernel(concat!("lean_", $($type,)* "_d", $tall)),
            Params::kernel(concat!("lean_", $($type,)* "_d", $short)),
        ]
    };
}

/// Of pages: always for few rows.
macro_rules! paged {
    ($type:literal) => {
        [
            ([64, 64], dense!(("paged_", $type) "64_small" "64_small")),
            ([128, 128], dense!(("paged_", $type) "128_small" "128_small")),
            ([256, 256], dense!(("paged_", $type) "256" "256")),
        ]
    };
}

/// Most columns of queries and values; the kernels for many rows and for few.
type Dense = ([usize; 2], [KernelRef<Params>; 2]);

const DENSE: [&[Dense]; 2] = [&dense!("bf16"), &dense!("f16")];
const DENSE_PAGED: [&[Dense]; 2] = [&paged!("bf16"), &paged!("f16")];
/// By type: for up to 128 and 256 columns.
const GENERAL: [[KernelRef<Params>; 2]; 3] = [
    [Params::kernel("lean_general_bf16_128"), Params::kernel("lean_general_bf16_256")],
    [Params::kernel("lean_general_f16_128"), Params::kernel("lean_general_f16_256")],
    [Params::kernel("lean_general_f32_128"), Params::kernel("lean_general_f32_256")],
];
const MERGE: [KernelRef<Params>; 3] =
    [Params::kernel("lean_merge_bf16"), Params::kernel("lean_merge_f16"), Params::kernel("lean_merge_f32")];

impl<'a> Problem<'a> {
    /// Launches kernels on `sequences` of `sq` queries over consecutive keys or pages, of `sk` keys in all, with the work divided among
    /// programs.
    pub fn run_lean(
        mut self,
        programs: Programs,
        workspace: Option<TensorViewMut<'a, f32>>,
        sequences: usize,
        [sq, sk]: [usize; 2],
    ) -> Result<()> {
        let op = self.op;
        if let Programs::Count(n) = programs
            && !(1..=MOST_PROGRAMS).contains(&n)
        {
            return Err(Error::argument(op, "programs", n, format!("1 to {MOST_PROGRAMS}")));
        }
        if let Some(workspace) = &workspace {
            workspace.dims::<1>(op, "workspace")?;
            workspace.expect_contiguous(op, "workspace")?;
            workspace.expect_aligned(op, "workspace", 16)?;
        }
        let (n, queries) = (self.count("q", sequences)?, self.count("q", sq)?);
        let rows = self.count("q", sq.saturating_mul(self.params.group as usize))? as usize;
        let (heads, kv_heads) = (self.params.heads, self.params.kv_heads as usize);
        if n == 0 || rows == 0 || heads == 0 {
            return Ok(());
        }
        let s = &mut self.params.sequences;
        (s.n, s.sq, s.sk) = (n, queries, s.total_k);
        let info = self.stream.device().info();
        let [dqk, dv] = [self.params.dqk, self.params.dv].map(|columns| columns as usize);
        let of_type = match self.kernel {
            DType::F16 => 1,
            DType::F32 => 2,
            _ => 0,
        };
        let (shape, kernel) = match self.dense_keys() {
            Some(keys @ (DenseKeys::Fresh | DenseKeys::Paged)) => {
                let (shape, tall) = dense_shape(info.arch, keys, dv, rows);
                let table = if keys == DenseKeys::Paged { DENSE_PAGED } else { DENSE }[of_type];
                let fits = |([most_qk, most_v], _): &&Dense| dqk <= *most_qk && dv <= *most_v;
                (shape, table.iter().find(fits).map(|(_, kernels)| kernels[usize::from(!tall)]))
            }
            _ => (GENERAL_SHAPE, Some(GENERAL[of_type][usize::from(dqk > 128 || dv > 128)])),
        };
        let tiles_alone = self.params.pages.table == 0;
        let list = List { sequences, kv_heads, rows, keys: sk, tiles_alone };
        let division = Division::of(info, shape, programs, list);
        let without = tiles_alone && programs == Programs::Auto && workspace.is_none();
        let division = division.filter(|_| !without);
        let (Some(division), Some(kernel)) = (division, kernel) else {
            return self.run_batched(sequences, [sq, sk]);
        };
        if list.units(shape) > MOST_UNITS {
            let what = format!("{} units of work", list.units(shape));
            return Err(Error::too_large(op, "k", what, MOST_UNITS as u64));
        }
        let (want, got) = (division.workspace(dv), workspace.as_ref().map_or(0, |w| w.numel()));
        if got < want {
            let want = format!("[{want}] or longer ({} programs)", division.programs);
            return Err(Error::shape(op, "workspace", [got], want));
        }
        let tiles = rows.div_ceil(shape.rows);
        self.params.sequences.tiles_of_one = tiles as u32;
        let splits = &mut self.params.splits;
        (splits.count, splits.rows) = (division.programs as u32, division.rows as u32);
        let merge = if division.programs > 1 { Some(self.stream.kernel(MERGE[of_type])?) } else { None };
        if let Some(mut workspace) = workspace.filter(|_| merge.is_some()) {
            let acc = self.launch.output_address("workspace", &mut workspace)?;
            let rows = 2 * division.programs * division.rows;
            splits.acc = acc;
            splits.sums = acc + (4 * rows * (floats_per_row(dv) - 2)) as u64;
        }
        let kernel = self.stream.kernel(kernel)?;
        // SAFETY: the operator has checked rows, heads and columns of each tensor against each other; the kernels clamp lengths, which
        // are on the device, to the rows of keys.
        unsafe { self.launch.run(&kernel, LaunchConfig::grid_1d(division.programs), &self.params)? };
        if let Some(merge) = merge {
            let chunks = division.rows.div_ceil(256 / dv.div_ceil(4));
            let blocks = (division.programs - 1) * chunks;
            // SAFETY: the partial results that the first launch says there are lie within the workspace.
            unsafe { self.stream.launch(op).run(&merge, LaunchConfig::grid_1d(blocks), &self.params)? };
        }
        Ok(())
    }
}
