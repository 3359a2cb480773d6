//! Modelled time of a device with the option `time`: what its launches, fills and copies take on a part, by hk-time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hk_codeobj::Arch;
use hk_emu::{Dispatch, Module};
use hk_time::constants::Values;
use hk_time::launch::Launch;
use hk_time::model::Options;
use hk_time::parts::Part;

use crate::error::{HipError, Result};
use crate::runtime::{Device, lock, say};
use crate::stream::StreamRef;

/// When a stream is somewhere: microseconds since the device's first command, or why that is not known.
type Time = std::result::Result<f64, String>;

/// The time of a stream after its last command.
struct Stream {
    now: Time,
    blocking: bool,
}

/// The clocks of a device's streams, by their ids.
pub(crate) struct Clock {
    pub part: &'static Part,
    streams: Mutex<HashMap<u64, Stream>>,
}

impl Clock {
    /// Of a part by name; else what is wanted.
    pub fn new(name: &str, arch: Arch) -> std::result::Result<Clock, String> {
        let part = Part::of_target(name, arch).map_err(|names| format!("time=PART with one of {names}"))?;
        Ok(Clock { part, streams: Mutex::default() })
    }

    /// Where a stream is: behind its own commands and those that the null stream orders. A command that runs has all of these
    /// behind it and none that come later, so that the order in which threads run commands does not matter.
    fn now(&self, on: StreamRef) -> Time {
        let streams = lock(&self.streams);
        let before = |(id, stream): &(&u64, &Stream)| {
            **id == on.id || (on.id == 0 && stream.blocking) || (**id == 0 && on.is_blocking())
        };
        let mut times = streams.iter().filter(before).map(|(_, stream)| stream.now.clone());
        times.try_fold(0.0, |last: f64, time| Ok(last.max(time?)))
    }

    fn set(&self, on: StreamRef, now: Time) {
        lock(&self.streams).insert(on.id, Stream { now, blocking: on.is_blocking() });
    }

    fn add(&self, on: StreamRef, us: Time) {
        self.set(on, self.now(on).and_then(|now| Ok(now + us?)));
    }

    /// A fill or a copy on the device, which moves so many bytes.
    pub fn moved(&self, on: StreamRef, bytes: u64) {
        self.add(on, Ok(self.part.stream_us(bytes as f64, Values::fitted())));
    }

    /// A launch that is about to run.
    pub fn launch(&self, on: StreamRef, module: &Arc<Module>, kernel: &str, dispatch: &Dispatch<'_>) {
        let launch = Launch::new(self.part, &on.device.machine, module, kernel, dispatch, Options::default());
        self.add(on, launch.map(|launch| launch.prediction.us).map_err(|why| format!("{kernel}: {why}")));
    }

    /// All streams start at 0 again.
    pub fn reset(&self) {
        lock(&self.streams).clear();
    }
}

/// When an event was recorded: by the host's clock, and modelled.
#[derive(Clone)]
pub(crate) struct Stamp {
    host: Instant,
    modelled: Option<Time>,
}

impl Stamp {
    /// On a stream, whose commands before it are done.
    pub fn on(stream: StreamRef) -> Stamp {
        let clock = stream.device.clock.as_ref();
        Stamp { host: Instant::now(), modelled: clock.map(|clock| clock.now(stream)) }
    }

    /// The stream goes on when it has been recorded.
    pub fn wait(&self, on: StreamRef) {
        if let (Some(clock), Some(at)) = (&on.device.clock, &self.modelled) {
            clock.set(on, clock.now(on).and_then(|now| Ok(now.max(at.clone()?))));
        }
    }

    /// Milliseconds from an event of the device to this one: modelled if the device has the option `time`, else of the host. The
    /// first call says on stderr which.
    ///
    /// # Errors
    /// `hipErrorNotSupported`, after saying why, if a launch before this event could not be modelled.
    pub fn ms_since(&self, earlier: &Stamp, device: &Device) -> Result<f64> {
        let (Some(clock), Some(from), Some(to)) = (&device.clock, &earlier.modelled, &self.modelled) else {
            device.said_clock.call_once(|| {
                let (ordinal, arch) = (device.ordinal, device.arch);
                say!(
                    "times of events of device {ordinal} are the host's; modelled ones with HK_EMU_ARCH={arch}?time=PART, PART one of {}",
                    Part::names(arch)
                );
            });
            let ns =
                |later: Instant, earlier: Instant| later.saturating_duration_since(earlier).as_nanos() as f64;
            return Ok((ns(self.host, earlier.host) - ns(earlier.host, self.host)) / 1e6);
        };
        device.said_clock.call_once(|| {
            let (ordinal, part) = (device.ordinal, clock.part);
            say!("times of events of device {ordinal} are those of {} ({})", part.name, part.error());
        });
        match (from, to) {
            (Ok(from), Ok(to)) => Ok((to - from) / 1e3),
            (Err(why), _) | (_, Err(why)) => {
                say!("hipEventElapsedTime: no modelled time: {why}");
                Err(HipError::NOT_SUPPORTED)
            }
        }
    }
}
