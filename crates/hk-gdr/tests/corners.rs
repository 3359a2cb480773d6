//! Every kernel on its corner cases.

hk_testkit::corner_tests!(hk_gdr::OPERATORS: fused_recurrent);
