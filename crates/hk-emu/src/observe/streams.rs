//! Races between launches and copies on different streams.
//!
//! Every stream has a clock that its launches and copies count up, and knows the clocks of the work that it is behind:
//! its own, what it has waited for, and what the host had waited for when it queued the work. Each byte keeps its last
//! writer and the readers since; a later access must be ordered after both.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use super::access::Part;
use crate::fault::{Access, Space};
use crate::memory::{Near, StreamRace};

/// A point in the order of a device's work: everything that has happened before it. For
/// [`Check::Streams`](crate::Check::Streams); without that check it holds nothing.
#[derive(Debug, Clone, Default)]
pub struct Mark(Vec<u64>);

impl Mark {
    fn join(&mut self, other: &Mark) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a = (*a).max(*b);
        }
    }

    fn at(&mut self, stream: usize) -> &mut u64 {
        if self.0.len() <= stream {
            self.0.resize(stream + 1, 0);
        }
        &mut self.0[stream]
    }

    fn knows(&self, work: &Work) -> bool {
        self.0.get(work.stream).is_some_and(|clock| *clock >= work.clock)
    }
}

/// A launch or a copy.
#[derive(Clone)]
struct Work {
    stream: usize,
    clock: u64,
    name: Arc<str>,
}

impl PartialEq for Work {
    fn eq(&self, other: &Work) -> bool {
        (self.stream, self.clock) == (other.stream, other.clock)
    }
}

/// State shared by consecutive bytes.
#[derive(Clone, PartialEq)]
struct Span {
    end: u64,
    writer: Option<Work>,
    readers: Vec<Work>,
}

/// The order of all work of a device, as streams, events and the host's waits make it.
#[derive(Default)]
pub(crate) struct Order {
    /// Of each stream; the first is the host.
    streams: Vec<Mark>,
    /// By first byte.
    spans: BTreeMap<u64, Span>,
}

/// Work that has begun.
pub(crate) struct Begun {
    work: Work,
    knows: Mark,
}

impl Order {
    /// A new stream. The first is the host's.
    pub fn stream(&mut self) -> usize {
        self.streams.push(Mark::default());
        self.streams.len() - 1
    }

    pub fn mark(&self, stream: usize) -> Mark {
        self.streams.get(stream).cloned().unwrap_or_default()
    }

    pub fn wait(&mut self, stream: usize, mark: &Mark) {
        if let Some(own) = self.streams.get_mut(stream) {
            own.join(mark);
        }
    }

    pub fn begin(&mut self, stream: usize, name: &str) -> Begun {
        let mut knows = self.mark(stream);
        *knows.at(stream) += 1;
        let clock = *knows.at(stream);
        self.wait(stream, &knows);
        Begun { work: Work { stream, clock, name: name.into() }, knows }
    }

    /// Records the bytes that work has used. The first that race are returned; the caller knows what lies there.
    pub fn access(&mut self, begun: &Begun, access: Access, start: u64, end: u64) -> Option<StreamRace> {
        let Begun { work, knows } = begun;
        // Spans end where the bytes begin and end.
        for at in [start, end] {
            let split = self.spans.range(..at).next_back().filter(|(_, span)| span.end > at);
            if let Some(span) = split.map(|(_, span)| span.clone())
                && let Some((_, left)) = self.spans.range_mut(..at).next_back()
            {
                left.end = at;
                self.spans.insert(at, span);
            }
        }
        let mut race: Option<StreamRace> = None;
        let mut out: Vec<(u64, Span)> = vec![];
        let mut add = |first: u64, span: Span| match out.last_mut() {
            Some((_, last))
                if last.end == first && (&last.writer, &last.readers) == (&span.writer, &span.readers) =>
            {
                last.end = span.end;
            }
            _ => out.push((first, span)),
        };
        let mut at = start;
        let old: Vec<(u64, Span)> = self.spans.range(start..end).map(|(a, s)| (*a, s.clone())).collect();
        for (first, span) in old.into_iter().chain([(end, Span { end, writer: None, readers: vec![] })]) {
            let writer = (access == Access::Write).then(|| work.clone());
            let readers = if access == Access::Read { vec![work.clone()] } else { vec![] };
            if at < first {
                add(at, Span { end: first, writer: writer.clone(), readers: readers.clone() });
            }
            at = span.end;
            if first == end {
                break;
            }
            let of_writer = span.writer.iter().map(|w| (w, Access::Write));
            let of_readers = span.readers.iter().map(|r| (r, Access::Read));
            let other = of_writer
                .chain(of_readers.filter(|_| access == Access::Write))
                .find(|(other, _)| **other != *work && !knows.knows(other));
            if let Some((other, other_access)) = other {
                let other = describe(other);
                match &mut race {
                    Some(race) if race.address + race.bytes == first && race.other == other => {
                        race.bytes += span.end - first;
                    }
                    Some(_) => {}
                    None => {
                        race = Some(StreamRace {
                            work: describe(work),
                            access,
                            other,
                            other_access,
                            address: first,
                            bytes: span.end - first,
                            near: Near::Nothing,
                        });
                    }
                }
            }
            if access == Access::Write {
                add(first, Span { end: span.end, writer, readers });
            } else {
                let kept = span.readers.into_iter().filter(|other| !knows.knows(other)).chain(readers);
                add(first, Span { end: span.end, writer: span.writer, readers: kept.collect() });
            }
        }
        self.spans.retain_outside(start, end);
        self.spans.extend(out);
        race
    }

    /// Removes memory that was freed.
    pub fn forget(&mut self, start: u64, end: u64) {
        self.spans.retain_outside(start, end);
    }
}

trait RetainOutside {
    /// Removes the keys from `start` up to `end`.
    fn retain_outside(&mut self, start: u64, end: u64);
}

impl RetainOutside for BTreeMap<u64, Span> {
    fn retain_outside(&mut self, start: u64, end: u64) {
        let keys: Vec<u64> = self.range(start..end).map(|(at, _)| *at).collect();
        for key in keys {
            self.remove(&key);
        }
    }
}

fn describe(work: &Work) -> String {
    match work.stream {
        0 => format!("{} by the host", work.name),
        stream => format!("{} on stream {stream}", work.name),
    }
}

const PAGE: u64 = 4096;
const WORDS: usize = PAGE as usize / 64;

/// Bytes of global memory that a launch has read and written, one bit each.
#[derive(Default)]
pub(crate) struct Touched {
    pages: HashMap<u64, Box<[[u64; WORDS]; 2]>>,
}

impl Touched {
    pub fn step(&mut self, accesses: &[Part]) {
        for part in accesses.iter().filter(|part| part.space == Space::Global) {
            // Lanes with consecutive addresses are one run.
            let mut run = (0, 0);
            for (_, address) in part.lanes() {
                let end = address.saturating_add(part.bytes.into());
                if address == run.1 {
                    run.1 = end;
                } else {
                    self.touch(run.0, run.1, part.access);
                    run = (address, end);
                }
            }
            self.touch(run.0, run.1, part.access);
        }
    }

    fn touch(&mut self, start: u64, end: u64, access: Access) {
        let mut at = start;
        while at < end {
            let page = self.pages.entry(at / PAGE).or_insert_with(|| Box::new([[0; WORDS]; 2]));
            let stop = end.min((at / PAGE + 1) * PAGE);
            while at < stop {
                let (word, bit) = ((at % PAGE / 64) as usize, at % 64);
                let n = (64 - bit).min(stop - at);
                let mask = (!0 >> (64 - n)) << bit;
                // Atomics count as writes, also against reads.
                page[usize::from(access != Access::Read)][word] |= mask;
                at += n;
            }
        }
    }

    pub fn merge(&mut self, other: &mut Touched) {
        for (number, bits) in other.pages.drain() {
            let page = self.pages.entry(number).or_insert_with(|| Box::new([[0; WORDS]; 2]));
            for (a, b) in page.as_flattened_mut().iter_mut().zip(bits.as_flattened()) {
                *a |= b;
            }
        }
    }

    /// Runs of bytes by ascending address: first, end.
    pub fn runs(&self, access: Access) -> Vec<(u64, u64)> {
        let mut numbers: Vec<_> = self.pages.keys().copied().collect();
        numbers.sort_unstable();
        let mut runs: Vec<(u64, u64)> = vec![];
        for number in numbers {
            for (word, bits) in self.pages[&number][usize::from(access != Access::Read)].iter().enumerate() {
                let (mut bits, base) = (*bits, number * PAGE + 64 * word as u64);
                while bits != 0 {
                    let start = u64::from(bits.trailing_zeros());
                    let n = u64::from((bits >> start).trailing_ones());
                    bits &= if start + n == 64 { 0 } else { !0 << (start + n) };
                    match runs.last_mut() {
                        Some((_, end)) if *end == base + start => *end += n,
                        _ => runs.push((base + start, base + start + n)),
                    }
                }
            }
        }
        runs
    }
}

/// What one workgroup touches, added to its launch's when the workgroup is done.
pub(crate) struct GroupTouched {
    own: Touched,
    launch: Arc<Mutex<Touched>>,
}

impl GroupTouched {
    pub fn new(launch: &Arc<Mutex<Touched>>) -> GroupTouched {
        GroupTouched { own: Touched::default(), launch: launch.clone() }
    }

    pub fn step(&mut self, accesses: &[Part]) {
        self.own.step(accesses);
    }
}

impl Drop for GroupTouched {
    fn drop(&mut self) {
        self.launch.lock().unwrap_or_else(PoisonError::into_inner).merge(&mut self.own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against bytes one by one.
    #[test]
    fn spans_keep_what_bytes_keep() {
        let mut order = Order::default();
        for _ in 0..3 {
            order.stream();
        }
        let mut bytes: Vec<(Option<Work>, Vec<Work>)> = vec![(None, vec![]); 64];
        let mut seed = 12345u64;
        let mut random = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        let (mut races, mut clean) = (0, 0);
        for _ in 0..5000 {
            let stream = random(3) as usize;
            if random(2) == 0 {
                let mark = order.mark(random(3) as usize);
                order.wait(stream, &mark);
            }
            let (start, write) = (random(60), random(2) == 0);
            let end = start + 1 + random(64 - start);
            let access = if write { Access::Write } else { Access::Read };
            let begun = order.begin(stream, "work");
            let (work, knows) = (&begun.work, &begun.knows);
            let mut first = None;
            for at in start..end {
                let (writer, readers) = &mut bytes[at as usize];
                let unknown = |w: &Work| !knows.knows(w);
                if writer.as_ref().is_some_and(unknown) || write && readers.iter().any(unknown) {
                    first = first.or(Some(at));
                }
                if write {
                    (*writer, *readers) = (Some(work.clone()), vec![]);
                } else {
                    readers.push(work.clone());
                }
            }
            let race = order.access(&begun, access, start, end);
            assert_eq!(race.as_ref().map(|race| race.address), first);
            *(if first.is_some() { &mut races } else { &mut clean }) += 1;
        }
        assert!(races > 100 && clean > 100, "{races} {clean}");
    }

    #[test]
    fn runs_of_bytes() {
        let mut touched = Touched::default();
        for (start, end) in [(10, 20), (20, 64), (64, 130), (4000, 9000), (200, 201)] {
            touched.touch(start, end, Access::Write);
        }
        assert_eq!(touched.runs(Access::Write), [(10, 130), (200, 201), (4000, 9000)]);
        assert_eq!(touched.runs(Access::Read), []);
    }
}
