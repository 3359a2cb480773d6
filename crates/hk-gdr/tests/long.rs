//! Many decode steps: how far states are from f64.

use crate::recurrent::relative;
use hk_core::{Element, TensorView, bf16};
use hk_gdr::reference::{Head, Token};
use hk_gdr::{Gates, RecurrentInputs, RecurrentOptions, StateElement, States, fused_recurrent};
use hk_testkit::{self as kit, Fill, Tensor, widen};
use std::ops::Range;

const STEPS: usize = 10_000;
/// Steps between two comparisons.
const EVERY: usize = 1000;
const DIM: usize = 16;

/// The errors of the state after every 1000th step, in calls of `tokens` tokens each; the state is updated in place. `strength`: factor of the
/// logarithms of decays, which are -0.05 on average.
fn errors<S: StateElement>(gpu: &kit::Gpu, tokens: usize, strength: f32) -> Vec<f64> {
    let normal = |stream: u64, n: usize| Fill::Normal.elements::<f32>(n, 0x5eed ^ stream << 32);
    let halves =
        |stream| -> Vec<bf16> { normal(stream, STEPS * DIM).iter().map(|x| bf16::from_f32(*x)).collect() };
    let (q, k, v) = (halves(1), halves(2), halves(3));
    let g: Vec<f32> = normal(4, STEPS).iter().map(|x| -0.0627 * strength * x.abs()).collect();
    let beta: Vec<f32> = normal(5, STEPS).iter().map(|x| 1.0 / (1.0 + x.exp())).collect();
    let [q_all, k_all, v_all] = [&q, &k, &v].map(|x| gpu.upload(x, [STEPS, 1, DIM]));
    let [g_all, beta_all] = [&g, &beta].map(|x| gpu.upload(x, [STEPS, 1]));
    let mut o = gpu.poisoned::<bf16>([tokens, 1, DIM]);
    let mut state = gpu.upload(&[S::from_f32(0.0); DIM * DIM], [1, 1, DIM, DIM]);
    let starts = gpu.upload(&[0, tokens as i32], [2]);
    let head = Head { k_dim: DIM, v_dim: DIM, scale: 0.25, l2norm: true };
    let mut exact = vec![0.0; DIM * DIM];
    let (wide_q, wide_k, wide_v) = (widen(&q), widen(&k), widen(&v));
    let mut errors = Vec::new();
    for first in (0..STEPS).step_by(tokens) {
        let range = first..first + tokens;
        let inputs = RecurrentInputs {
            q: part(&q_all, &range),
            k: part(&k_all, &range),
            v: part(&v_all, &range),
            gates: Gates {
                g: Some(part(&g_all, &range)),
                beta: Some(part(&beta_all, &range)),
                ..Gates::default()
            },
            cu_seqlens: Some(starts.view()),
        };
        let last = state.view_mut();
        let states = States::Dense { initial: Some(last.alias()), last: Some(last) };
        let options = RecurrentOptions { qk_l2norm: true, ..Default::default() };
        fused_recurrent(gpu.stream(), inputs, states, o.view_mut(), options).unwrap();
        for t in first..first + tokens {
            let row = t * DIM..(t + 1) * DIM;
            head.step(
                &mut exact,
                &Token {
                    q: &wide_q[row.clone()],
                    k: &wide_k[row.clone()],
                    v: &wide_v[row],
                    g: g[t].into(),
                    gk: &[],
                    gv: &[],
                    beta: &[beta[t].into()],
                },
            );
        }
        if (first + tokens).is_multiple_of(EVERY) {
            errors.push(relative(&gpu.download(&state).data, &exact));
        }
    }
    errors
}

fn part<'a, T: Element>(all: &'a Tensor<T>, range: &Range<usize>) -> TensorView<'a, T> {
    all.view().slice(0, range.clone()).unwrap()
}

fn shown(errors: &[f64]) -> String {
    errors.iter().map(|e| format!("{e:.1e}")).collect::<Vec<_>>().join(" ")
}

/// In f32, 1000 tokens a call: as good as one by one, since split calls have the same bits.
#[test]
fn f32_states_stay_near_f64() {
    for gpu in kit::devices() {
        for strength in [0.1, 1.0, 10.0] {
            let errors = errors::<f32>(&gpu, EVERY, strength);
            println!("f32, gates x {strength} on {}: {}", gpu.spec(), shown(&errors));
            assert_eq!(errors.len(), STEPS / EVERY);
            assert!(errors.iter().all(|e| *e <= 2e-5), "gates x {strength}: {errors:?}");
        }
    }
}

/// In bf16, rounded at every step.
#[test]
fn errors_of_bf16_states_do_not_grow() {
    for gpu in kit::devices() {
        for strength in [0.1, 1.0, 10.0] {
            let errors = errors::<bf16>(&gpu, 1, strength);
            println!("bf16, gates x {strength} on {}: {}", gpu.spec(), shown(&errors));
            assert!(errors.iter().all(|e| *e <= 5e-2), "gates x {strength}: {errors:?}");
            assert!(errors[9] <= 1.2 * errors[0], "gates x {strength}: {errors:?}");
        }
    }
}
