//! The constants of the model: each with its unit, and where it comes from.

use std::fmt;
use std::sync::OnceLock;

/// Where the value of a constant comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provenance {
    /// Published by AMD.
    Published,
    /// In LLVM's scheduling model or hazard rules.
    Compiler,
    /// Measured on hardware by others.
    Measured,
    /// Chosen, with no evidence yet.
    Assumed,
    /// Fitted to `data/calibration.csv` by `fit-timing`.
    Fitted,
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Provenance::Published => "published",
            Provenance::Compiler => "compiler",
            Provenance::Measured => "measured",
            Provenance::Assumed => "assumed",
            Provenance::Fitted => "fitted",
        })
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Constant {
    /// What it is called in `data/fitted.csv` and `docs/timing.md`.
    pub name: &'static str,
    /// Its value; of a fitted one, that which the fit starts from.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// What kind of source it has.
    pub provenance: Provenance,
    /// The source; of a fitted one, the rows that decide it, and what it stands for.
    pub source: &'static str,
    /// What a fitted one may become.
    pub range: [f64; 2],
}

/// Defines the constants, and an index for each.
macro_rules! constants {
    ($($(#[$doc:meta])* $Name:ident, $name:literal, $value:literal $unit:literal, $provenance:ident $([$low:literal, $high:literal])?, $source:literal;)*) => {
        /// A constant by name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        pub enum C {
            $($(#[$doc])* $Name,)*
        }

        /// Every constant, in the order of [`C`].
        pub const CONSTANTS: &[Constant] = &[
            $(Constant {
                name: $name,
                value: $value,
                unit: $unit,
                provenance: Provenance::$provenance,
                source: $source,
                range: constants!(@range $value $($low, $high)?),
            },)*
        ];
    };
    (@range $value:literal $low:literal, $high:literal) => { [$low, $high] };
    (@range $value:literal) => { [$value, $value] };
}

constants! {
    /// Time of a launch before the first wave starts and after the last one has ended.
    Launch, "launch", 1.5 "us", Fitted [0.2, 4.0], "all rows: device time of a kernel by the profiler, dispatch and end of kernel included";
    /// A wave's start: from the dispatch of a workgroup to its first instruction.
    WaveStart, "wave_start", 9.7 "clk", Assumed, "9.7 clocks a wave and XCD would explain published times of two Triton kernels of one row a wave";
    /// Bytes that a CU has asked for and not received, gfx942.
    FillGfx942, "fill_bytes_gfx942", 18500.0 "B", Fitted [6000.0, 48000.0], "MI308X and MI325X rows: bytes of a workgroup over time";
    /// The same, gfx950.
    FillGfx950, "fill_bytes_gfx950", 18500.0 "B", Fitted [6000.0, 48000.0], "MI355X rows: bytes of a workgroup over time";
    /// Bytes that L1 takes in a clock.
    FillPort, "fill_port", 64.0 "B/clk", Fitted [16.0, 64.0], "GEMM rows: the limit where latency is short";
    /// Latency of a line from HBM.
    HbmLatency, "hbm_latency", 500.0 "ns", Fitted [300.0, 1200.0], "rows with cold operands; 341-353 ns idle on MI300X, 500 ns on CDNA4 (measured)";
    /// Latency of a line from the memory-side cache.
    MallLatency, "mall_latency", 300.0 "ns", Fitted [180.0, 900.0], "rows of several rounds, and those with warm operands; 218-262 ns idle on MI300X (measured)";
    /// Latency of a line from L2.
    L2Latency, "l2_latency", 110.0 "ns", Measured, "81-122 ns on MI300X: a public bring-up log, Chips and Cheese";
    /// Latency of a line from L1.
    L1Latency, "l1_latency", 130.0 "clk", Measured, "120-145 clocks on MI300X, Chips and Cheese";
    /// Share of the peak rate of HBM that streams reach, gfx942.
    HbmGfx942, "hbm_reach_gfx942", 0.76 "1", Fitted [0.55, 0.95], "MI308X and MI325X rows with many bytes";
    /// The same, gfx950.
    HbmGfx950, "hbm_reach_gfx950", 0.85 "1", Fitted [0.55, 0.95], "MI355X rows with many bytes";
    /// Share of the peak rate of the memory-side cache.
    MallReach, "mall_reach", 0.69 "1", Measured, "11.9 of 17.2 TB/s on MI300X, Chips and Cheese";
    /// Share of the peak rate of L2.
    L2Reach, "l2_reach", 0.8 "1", Fitted [0.3, 1.0], "rows with many workgroups on an XCD";
    /// Bytes of stores that a CU sends in a clock.
    StorePort, "store_port", 32.0 "B/clk", Fitted [8.0, 64.0], "rows with large outputs and short K";
    /// From a store to its return.
    StoreLatency, "store_latency", 400.0 "ns", Fitted [150.0, 1500.0], "rows with short K: end of the kernel after its last store";
    /// Clocks of L2 for each lane of an atomic, of a CU's share.
    AtomicClocks, "atomic", 1.0 "clk", Fitted [0.1, 16.0], "bf16 rows with split K";
    /// Clocks of the address unit for each lane of a vector memory instruction.
    AddressLanes, "address", 16.0 "lanes/clk", Published, "ROCm Compute Profiler: 64 lanes in 4 clocks";
    /// Bytes that L1 returns in a clock.
    L1Return, "l1_return", 64.0 "B/clk", Published, "CDNA3 white paper";
    /// LDS latency of an access without conflicts, without the time of its data.
    LdsLatency, "lds_latency", 64.0 "clk", Measured, "69 clocks for a dependent read on gfx950: triton PR 2507; 48-64 on gfx942";
    /// Bytes of a port of two SIMDs in a clock, gfx942.
    LdsPortGfx942, "lds_port_gfx942", 64.0 "B/clk", Published, "ROCm Compute Profiler, LDS";
    /// The same for reads, gfx950.
    LdsPortGfx950, "lds_port_gfx950", 128.0 "B/clk", Published, "CDNA4 white paper: twice the read bandwidth of LDS";
    /// Clocks until a vector instruction's result can be read.
    VectorLatency, "vector_latency", 8.0 "clk", Measured, "8 clocks per dependent f32 FMA on gfx950: triton PR 2507";
    /// Clocks from the end of a matrix instruction's passes until others than its accumulation can read the result.
    MatrixLatency, "matrix_latency", 16.0 "clk", Compiler, "LLVM: passes + 4 quad-cycles";
    /// Clocks until a scalar instruction's result can be read.
    ScalarLatency, "scalar_latency", 4.0 "clk", Compiler, "LLVM: one quad-cycle";
    /// Latency of a scalar load that hits.
    ScalarHit, "scalar_hit", 60.0 "clk", Assumed, "about half of L1";
    /// Clocks of a wave for an instruction of the fetch alone: waits, no-ops, branches not taken.
    InternalClocks, "internal", 4.0 "clk", Published, "a wave issues one instruction in 4 clocks";
    /// Clocks more of a branch that is taken.
    BranchClocks, "branch_taken", 12.0 "clk", Assumed, "refill of the instruction buffer";
    /// Clocks from the last arrival at a barrier to the next instruction.
    BarrierClocks, "barrier", 12.0 "clk", Assumed, "8-16 clocks";
    /// Time for each 64 bytes of instructions that the cache does not hold.
    FetchMiss, "fetch_miss", 30.0 "ns", Fitted [0.0, 250.0], "short rows: the first pass through the code; prefetch of the next lines included";
    /// Clock of MI308X.
    ClockMi308x, "clock_mi308x", 1420.0 "MHz", Fitted [1250.0, 1800.0], "MI308X rows bound by matrix or issue; 1420 in the trade press";
    /// Clock of MI325X at full matrix duty.
    DutyMi325x, "matrix_clock_mi325x", 1330.0 "MHz", Fitted [900.0, 2100.0], "MI325X rows bound by matrix; 831 of 1307 TFLOP/s sustained (AMD)";
    /// Clock of MI355X at full matrix duty.
    DutyMi355x, "matrix_clock_mi355x", 1900.0 "MHz", Fitted [1200.0, 2400.0], "MI355X rows bound by matrix";
}

/// A value for each constant.
#[derive(Debug, Clone, PartialEq)]
pub struct Values(Vec<f64>);

const FITTED: &str = include_str!("../data/fitted.csv");

impl Values {
    /// Those of the table, fitted ones where the fit starts.
    pub fn start() -> Values {
        Values(CONSTANTS.iter().map(|c| c.value).collect())
    }

    /// The same with the fitted ones of `data/fitted.csv`.
    pub fn fitted() -> &'static Values {
        static FITTED_VALUES: OnceLock<Values> = OnceLock::new();
        FITTED_VALUES.get_or_init(|| {
            let mut values = Values::start();
            for line in FITTED.lines().skip(1) {
                let mut fields = line.split(',');
                let known = fields.next().and_then(|name| CONSTANTS.iter().position(|c| c.name == name));
                if let (Some(i), Some(Ok(value))) = (known, fields.next().map(str::parse)) {
                    values.0[i] = value;
                }
            }
            values
        })
    }

    /// The value of a constant.
    pub fn get(&self, constant: C) -> f64 {
        self.0[constant as usize]
    }

    /// The same with one changed, kept in its range.
    #[must_use]
    pub fn with(&self, index: usize, value: f64) -> Values {
        let mut values = self.clone();
        if let (Some(slot), Some(c)) = (values.0.get_mut(index), CONSTANTS.get(index)) {
            *slot = value.clamp(c.range[0], c.range[1]);
        }
        values
    }

    /// By the index in [`CONSTANTS`].
    pub fn at(&self, index: usize) -> f64 {
        self.0.get(index).copied().unwrap_or(0.0)
    }
}

/// Five significant digits.
fn rounded(value: f64) -> f64 {
    let decimals = (4.0 - value.abs().max(1e-9).log10().floor()).max(0.0) as usize;
    format!("{value:.decimals$}").parse().unwrap_or(value)
}

/// The text of `data/fitted.csv` for these values.
pub fn fitted_csv(values: &Values) -> String {
    let fitted = CONSTANTS.iter().enumerate().filter(|(_, c)| c.provenance == Provenance::Fitted);
    let rows = fitted.map(|(i, c)| format!("{},{},{}\n", c.name, rounded(values.at(i)), c.unit));
    std::iter::once("name,value,unit\n".to_owned()).chain(rows).collect()
}
