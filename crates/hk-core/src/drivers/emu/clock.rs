//! Modelled time of a stream: what its launches, fills and copies take on a part, by hk-time.

use super::Executed;
use hk_codeobj::Arch;
use hk_emu::{Dispatch, Machine, Module};
use std::sync::Arc;
use std::time::Duration;

/// When a stream is at an event: microseconds since it began, or why that is not known.
pub(super) type Time = Result<f64, String>;

/// From one event to a later one; `None` if it is not later.
pub(super) fn elapsed(from: &Time, to: &Time) -> Result<Option<Duration>, String> {
    let us = to.clone()? - from.clone()?;
    Ok((us >= 0.0).then(|| Duration::from_nanos((us * 1000.0).round() as u64)))
}

/// Which part the time is of.
#[derive(Clone, Copy)]
pub(super) struct Model {
    #[cfg(feature = "time")]
    part: &'static hk_time::parts::Part,
    sampled: bool,
}

impl Model {
    /// Of a part by name; else what is wanted.
    #[cfg(feature = "time")]
    pub fn new(name: &str, arch: Arch, sampled: bool) -> Result<Model, String> {
        let part = hk_time::parts::Part::of_target(name, arch);
        let part = part.map_err(|names| format!("time=PART with one of {names}"))?;
        Ok(Model { part, sampled })
    }

    #[cfg(not(feature = "time"))]
    pub fn new(_: &str, _: Arch, _: bool) -> Result<Model, String> {
        Err("the cargo feature `time` of hk-core for time=PART".into())
    }
}

/// The clock of a stream.
pub(super) struct Clock {
    model: Model,
    now: Time,
}

impl Clock {
    pub fn new(model: Model) -> Clock {
        Clock { model, now: Ok(0.0) }
    }

    pub fn now(&self) -> Time {
        self.now.clone()
    }

    /// Launches are modelled only.
    pub fn sampled(&self) -> bool {
        self.model.sampled
    }

    /// The stream goes on when another one is at this time.
    pub fn wait(&mut self, at: &Time) {
        self.now = match (&self.now, at) {
            (Ok(own), Ok(other)) => Ok(own.max(*other)),
            (Err(why), _) | (_, Err(why)) => Err(why.clone()),
        };
    }

    /// A fill or a copy on the device, which moves so many bytes.
    #[cfg(feature = "time")]
    pub fn moved(&mut self, bytes: u64) {
        self.add(Ok(self.model.part.stream_us(bytes as f64, hk_time::constants::Values::fitted())));
    }

    #[cfg(not(feature = "time"))]
    pub fn moved(&mut self, _: u64) {}

    #[cfg(feature = "time")]
    fn add(&mut self, us: Time) {
        match (&mut self.now, us) {
            (Ok(now), Ok(us)) => *now += us,
            (now @ Ok(_), why) => *now = why,
            (Err(_), _) => {}
        }
    }

    /// Models a launch that is about to be executed; `keep`: for `take_launches`.
    #[cfg(feature = "time")]
    pub fn launch(
        &mut self,
        machine: &Machine,
        module: &Arc<Module>,
        kernel: &str,
        dispatch: &Dispatch<'_>,
        keep: bool,
        executed: &mut Executed,
    ) {
        let options = hk_time::model::Options::default();
        match hk_time::launch::Launch::new(self.model.part, machine, module, kernel, dispatch, options) {
            Ok(launch) => {
                self.add(Ok(launch.prediction.us));
                executed.launch = keep.then_some(Ok(launch));
            }
            Err(why) => {
                let why = format!("{kernel}: {why}");
                executed.launch = keep.then(|| Err(why.clone()));
                self.add(Err(why));
            }
        }
    }

    #[cfg(not(feature = "time"))]
    pub fn launch(
        &mut self,
        _: &Machine,
        _: &Arc<Module>,
        _: &str,
        _: &Dispatch<'_>,
        _: bool,
        _: &mut Executed,
    ) {
    }
}
