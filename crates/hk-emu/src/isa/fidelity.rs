//! How faithful the emulation of each instruction is: rules by instruction, each with its reason.

use std::fmt;

use hk_codeobj::Arch;

use super::{Encoding, Op};

/// How faithful the emulation of an instruction is. Of floating-point results the payload of a NaN that no operand
/// supplies is unverified throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fidelity {
    /// The result is specified to the bit, and computed so.
    Exact,
    /// The hardware may differ from the result within a published bound.
    SpecBounded,
    /// Stands for something that the emulator does not have, such as time.
    Approximate,
    /// Follows a reading of the documentation that no published result of the hardware confirms.
    Unverified,
    /// Not executed, on purpose: a launch that reaches it ends with an error that names it.
    Refused,
}

impl Fidelity {
    /// Every class, the most faithful first.
    pub const ALL: [Fidelity; 5] = [
        Fidelity::Exact,
        Fidelity::SpecBounded,
        Fidelity::Approximate,
        Fidelity::Unverified,
        Fidelity::Refused,
    ];
}

impl fmt::Display for Fidelity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fidelity::Exact => "exact",
            Fidelity::SpecBounded => "spec-bounded",
            Fidelity::Approximate => "approximate",
            Fidelity::Unverified => "unverified",
            Fidelity::Refused => "refused",
        })
    }
}

impl Op {
    /// How faithful the emulation on `arch` is, and why.
    pub fn fidelity(self, arch: Arch) -> (Fidelity, &'static str) {
        use Op::*;
        if let Some(why) = self.refusal() {
            return (Fidelity::Refused, why);
        }
        let name = self.info().name;
        let starts = |stems: &[&str]| stems.iter().any(|stem| name.starts_with(stem));
        match self {
            S_MEMTIME | S_MEMREALTIME => {
                (Fidelity::Approximate, "a modelled clock: what the wave's instructions take to issue")
            }
            S_GETREG_B32 => {
                (Fidelity::Approximate, "MODE and XCC_ID are the wave's, of the others what it can observe")
            }
            S_SENDMSG => (Fidelity::Approximate, "the host serves an interrupt before the wave goes on"),
            S_SLEEP => (Fidelity::Approximate, "64 clocks of the modelled time for each unit"),
            S_SETPRIO | S_WAKEUP => (Fidelity::Approximate, "a hint to the schedule; takes no time"),
            _ if starts(&["V_RCP_F64", "V_RSQ_F64", "V_SQRT_F64"]) => {
                (Fidelity::SpecBounded, "rounded correctly or nearly so; a first approximation on hardware")
            }
            _ if starts(&["V_EXP_", "V_LOG_", "V_RCP_", "V_RSQ_", "V_SQRT_", "V_SIN_", "V_COS_"]) => (
                Fidelity::SpecBounded,
                "rounded correctly, but for two f32 of v_exp_f32; the hardware is within about 1 ulp",
            ),
            _ if self.is_mfma() => matrix(self, arch),
            _ if starts(&["V_CVT_SCALEF32", "V_CVT_SR_F16", "V_CVT_SR_BF16"]) => {
                (Fidelity::Unverified, "rounding, saturation and scale by documentation alone")
            }
            V_PRNG_B32 => (Fidelity::Unverified, "the recurrence by documentation alone"),
            _ if starts(&["V_DOT2_F32", "V_DOT2C_F32"]) => (
                Fidelity::Unverified,
                "two fused steps, low half first; the hardware's order is not published",
            ),
            V_CVT_PK_U8_F32 | V_CVT_PKACCUM_U8_F32 => {
                (Fidelity::Unverified, "rounds to nearest even; the manual names no mode")
            }
            S_CBRANCH_G_FORK | S_CBRANCH_I_FORK | S_CBRANCH_JOIN => {
                (Fidelity::Unverified, "by the manual of an older part")
            }
            _ if starts(&["S_SCRATCH_", "S_ATC_PROBE", "S_DCACHE_DISCARD"]) => {
                (Fidelity::Unverified, "by the manual of an older part")
            }
            DS_READ_B64_TR_B4 | DS_READ_B96_TR_B6 => {
                (Fidelity::Unverified, "the order of elements follows that of the wider forms")
            }
            DS_WRAP_RTN_B32
            | DS_CONDXCHG32_RTN_B64
            | DS_APPEND
            | DS_CONSUME
            | DS_READ_ADDTID_B32
            | DS_WRITE_ADDTID_B32 => (Fidelity::Unverified, "by the manual of an older part"),
            GLOBAL_LOAD_LDS_DWORDX3 => (Fidelity::Unverified, "lanes 16 bytes apart in LDS"),
            _ if name.contains("BUFFER_") && name.contains("_FORMAT_") => (
                Fidelity::Unverified,
                "rounding, saturation and the order of components by documentation alone",
            ),
            _ if name.contains("_D16") && (name.contains("_LOAD_") || name.contains("_READ_")) => (
                Fidelity::Unverified,
                "keeps the other half; compilers do not rely on it where memory has ECC",
            ),
            _ => (Fidelity::Exact, "specified to the bit"),
        }
    }

    /// Why the emulator does not execute it, where it does not on purpose.
    pub(crate) fn refusal(self) -> Option<&'static str> {
        use Op::*;
        Some(match self {
            DS_GWS_INIT
            | DS_GWS_SEMA_V
            | DS_GWS_SEMA_BR
            | DS_GWS_SEMA_P
            | DS_GWS_SEMA_RELEASE_ALL
            | DS_GWS_BARRIER => "synchronisation over the device needs a resource that a queue must allot",
            S_RFE_B64 | S_RFE_RESTORE_B64 | S_ENDPGM_SAVED => "only a trap handler may use it",
            S_SENDMSGHALT | S_SETHALT | S_SETKILL => "there is no debugger that would let the wave go on",
            S_ENDPGM_ORDERED_PS_DONE | V_SCREEN_PARTITION_4SE_B32 => "for graphics alone",
            _ => return None,
        })
    }
}

/// The classes of matrix instructions, in the best of the numerics modes.
fn matrix(op: Op, arch: Arch) -> (Fidelity, &'static str) {
    let name = op.info().name;
    let has = |part: &str| name.contains(part);
    if has("_I32_") {
        (Fidelity::Exact, "integers")
    } else if has("FP8") || has("BF8") || has("F8F6F4") {
        (Fidelity::Unverified, "how sums of 8-bit products are merged is not published")
    } else if arch == Arch::Gfx950 && !has("F64") {
        (Fidelity::Unverified, "no model of this part's accumulation is published")
    } else if has("SMFMAC") {
        (Fidelity::Unverified, "no model of sparse accumulation is published")
    } else if has("F64") || name.ends_with("_F32") {
        (Fidelity::Exact, "fused steps in ascending order, as published")
    } else {
        (Fidelity::Exact, "in the numerics mode cdna3-exact, as published; `fma` rounds more often")
    }
}

/// The row of a status table that an instruction belongs to.
pub fn group(op: Op) -> &'static str {
    match op.info().encoding {
        _ if op.is_mfma() => "MFMA, SMFMAC",
        Encoding::Sop1 => "SOP1",
        Encoding::Sop2 => "SOP2",
        Encoding::Sopk => "SOPK",
        Encoding::Sopc => "SOPC",
        Encoding::Sopp => "SOPP",
        Encoding::Smem => "SMEM",
        Encoding::Vop1 => "VOP1",
        Encoding::Vop2 => "VOP2",
        Encoding::Vopc => "VOPC",
        Encoding::Vop3 => "VOP3",
        Encoding::Vop3p => "VOP3P",
        Encoding::Ds => "DS",
        Encoding::Flat => "FLAT",
        Encoding::Global => "GLOBAL",
        Encoding::Scratch => "SCRATCH",
        Encoding::Mubuf => "MUBUF",
        Encoding::Mtbuf => "MTBUF",
    }
}
