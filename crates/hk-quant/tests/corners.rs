//! Every kernel on its corner cases: under all sanitizers, and none left out.

use hk_quant::OPERATORS;
use hk_testkit as kit;

#[test]
fn every_kernel_runs() {
    kit::assert_every_kernel_runs(OPERATORS);
}

/// A test per operator, so that they run side by side.
macro_rules! no_finding {
    ($($name:ident),+ $(,)?) => {$(
        #[test]
        fn $name() {
            let operator = OPERATORS.iter().find(|o| o.name == stringify!($name));
            kit::check_corners(operator.unwrap_or_else(|| panic!("no operator {}", stringify!($name))));
        }
    )+

        #[test]
        fn every_operator_is_checked() {
            let names: Vec<_> = OPERATORS.iter().map(|o| o.name).collect();
            assert_eq!(names, [$(stringify!($name)),+]);
        }
    };
}

no_finding!(
    per_token_quant,
    smoothquant,
    moe_smoothquant,
    per_tensor_quant_static,
    per_tensor_quant_dynamic,
    downcast_to_static_fp8,
    group_quant,
    dynamic_mxfp4_quant,
    downcast_to_mxfp,
    upcast_from_mxfp,
    shuffle_scales,
    unshuffle_scales,
    fp8_ocp_to_fnuz,
    fp8_fnuz_to_ocp,
    fused_rmsnorm_fp8_quant,
    fused_rmsnorm_mxfp4_quant,
);
