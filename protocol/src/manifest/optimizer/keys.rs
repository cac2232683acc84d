//! The optimizer as a section of `run.toml`: which keys each rule and each schedule has.

use serde::{Deserialize, Serialize};

use super::{Adafactor, Adam, Lars, Lion, Muon, Optimizer, RateScale, Rule, Schedule, Sgd};

/// A key that does not fit the optimizer of its section.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownKey {
    /// A key of another rule or schedule.
    #[error("unknown key `{key}`: {choice} = \"{name}\" does not have it")]
    OfAnother {
        /// The key.
        key: &'static str,
        /// `kind` or `schedule`.
        choice: &'static str,
        /// Its value.
        name: &'static str,
    },
    /// A key that the schedule needs.
    #[error("missing key `{key}`: schedule = \"{name}\" needs it")]
    Missing {
        /// The key.
        key: &'static str,
        /// The schedule.
        name: &'static str,
    },
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    #[default]
    Adamw,
    Sgd,
    Lion,
    Muon,
    Lamb,
    Lars,
    Adafactor,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ScheduleKind {
    #[default]
    Cosine,
    Linear,
    Wsd,
    Constant,
}

impl ScheduleKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Cosine => "cosine",
            Self::Linear => "linear",
            Self::Wsd => "wsd",
            Self::Constant => "constant",
        }
    }
}

/// All keys. Those that a rule or a schedule does not have are `None`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    #[serde(default)]
    kind: Kind,
    learning_rate: f64,
    warmup_steps: u64,
    #[serde(default)]
    schedule: ScheduleKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    final_learning_rate: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decay_steps: Option<u64>,
    weight_decay: f64,
    gradient_clip: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    momentum: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nesterov: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate_scale: Option<RateScale>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rest_learning_rate: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    beta1: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    beta2: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trust_coefficient: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decay_exponent: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    epsilon: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scale_epsilon: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    clip_threshold: Option<f64>,
}

impl Section {
    /// Takes the keys of a rule; keys that are absent have the values of its paper.
    fn take_rule(&mut self) -> Rule {
        match self.kind {
            Kind::Adamw => Rule::Adamw(self.take_adam(Adam::DEFAULT)),
            Kind::Lamb => Rule::Lamb(self.take_adam(Adam { epsilon: 1e-6, ..Adam::DEFAULT })),
            Kind::Sgd => Rule::Sgd(Sgd {
                momentum: self.momentum.take().unwrap_or(0.9),
                nesterov: self.nesterov.take().unwrap_or(false),
            }),
            Kind::Lion => Rule::Lion(Lion {
                beta1: self.beta1.take().unwrap_or(0.9),
                beta2: self.beta2.take().unwrap_or(0.99),
            }),
            Kind::Muon => Rule::Muon(Muon {
                momentum: self.momentum.take().unwrap_or(0.95),
                nesterov: self.nesterov.take().unwrap_or(true),
                rate_scale: self.rate_scale.take().unwrap_or(RateScale::Original),
                rest_learning_rate: self.rest_learning_rate.take().unwrap_or(self.learning_rate),
                rest: self.take_adam(Adam::DEFAULT),
            }),
            Kind::Lars => Rule::Lars(Lars {
                momentum: self.momentum.take().unwrap_or(0.9),
                trust_coefficient: self.trust_coefficient.take().unwrap_or(1e-3),
                epsilon: self.epsilon.take().unwrap_or(1e-8),
            }),
            Kind::Adafactor => Rule::Adafactor(Adafactor {
                decay_exponent: self.decay_exponent.take().unwrap_or(0.8),
                epsilon: self.epsilon.take().unwrap_or(1e-15),
                scale_epsilon: self.scale_epsilon.take().unwrap_or(1e-3),
                clip_threshold: self.clip_threshold.take().unwrap_or(1.0),
            }),
        }
    }

    fn take_adam(&mut self, default: Adam) -> Adam {
        Adam {
            beta1: self.beta1.take().unwrap_or(default.beta1),
            beta2: self.beta2.take().unwrap_or(default.beta2),
            epsilon: self.epsilon.take().unwrap_or(default.epsilon),
        }
    }

    fn take_schedule(&mut self) -> Result<Schedule, UnknownKey> {
        let name = self.schedule.name();
        let missing = |key| UnknownKey::Missing { key, name };
        let mut last = || self.final_learning_rate.take().ok_or(missing("final_learning_rate"));
        Ok(match self.schedule {
            ScheduleKind::Cosine => Schedule::Cosine { final_learning_rate: last()? },
            ScheduleKind::Linear => Schedule::Linear { final_learning_rate: last()? },
            ScheduleKind::Wsd => Schedule::Wsd {
                final_learning_rate: last()?,
                decay_steps: self.decay_steps.take().ok_or(missing("decay_steps"))?,
            },
            ScheduleKind::Constant => Schedule::Constant,
        })
    }

    /// Checks that all keys have been taken.
    fn check_taken(&self, rule: &Rule) -> Result<(), UnknownKey> {
        let of_schedule = [
            ("final_learning_rate", self.final_learning_rate.is_some()),
            ("decay_steps", self.decay_steps.is_some()),
        ];
        let of_rule = [
            ("momentum", self.momentum.is_some()),
            ("nesterov", self.nesterov.is_some()),
            ("rate_scale", self.rate_scale.is_some()),
            ("rest_learning_rate", self.rest_learning_rate.is_some()),
            ("beta1", self.beta1.is_some()),
            ("beta2", self.beta2.is_some()),
            ("trust_coefficient", self.trust_coefficient.is_some()),
            ("decay_exponent", self.decay_exponent.is_some()),
            ("epsilon", self.epsilon.is_some()),
            ("scale_epsilon", self.scale_epsilon.is_some()),
            ("clip_threshold", self.clip_threshold.is_some()),
        ];
        let left = |keys: &[(&'static str, bool)]| {
            keys.iter().find(|(_, is_left)| *is_left).map(|(key, _)| *key)
        };
        if let Some(key) = left(&of_rule) {
            return Err(UnknownKey::OfAnother { key, choice: "kind", name: rule.name() });
        }
        match left(&of_schedule) {
            None => Ok(()),
            Some(key) => {
                let name = self.schedule.name();
                Err(UnknownKey::OfAnother { key, choice: "schedule", name })
            }
        }
    }

    fn set_rule(&mut self, rule: Rule) {
        match rule {
            Rule::Adamw(adam) => self.set_adam(Kind::Adamw, adam),
            Rule::Lamb(adam) => self.set_adam(Kind::Lamb, adam),
            Rule::Sgd(Sgd { momentum, nesterov }) => {
                self.kind = Kind::Sgd;
                (self.momentum, self.nesterov) = (Some(momentum), Some(nesterov));
            }
            Rule::Lion(Lion { beta1, beta2 }) => {
                self.kind = Kind::Lion;
                (self.beta1, self.beta2) = (Some(beta1), Some(beta2));
            }
            Rule::Muon(Muon { momentum, nesterov, rate_scale, rest_learning_rate, rest }) => {
                self.set_adam(Kind::Muon, rest);
                (self.momentum, self.nesterov) = (Some(momentum), Some(nesterov));
                self.rate_scale = Some(rate_scale);
                self.rest_learning_rate = Some(rest_learning_rate);
            }
            Rule::Lars(Lars { momentum, trust_coefficient, epsilon }) => {
                self.kind = Kind::Lars;
                (self.momentum, self.epsilon) = (Some(momentum), Some(epsilon));
                self.trust_coefficient = Some(trust_coefficient);
            }
            Rule::Adafactor(one) => {
                self.kind = Kind::Adafactor;
                self.decay_exponent = Some(one.decay_exponent);
                self.epsilon = Some(one.epsilon);
                self.scale_epsilon = Some(one.scale_epsilon);
                self.clip_threshold = Some(one.clip_threshold);
            }
        }
    }

    fn set_adam(&mut self, kind: Kind, adam: Adam) {
        self.kind = kind;
        (self.beta1, self.beta2) = (Some(adam.beta1), Some(adam.beta2));
        self.epsilon = Some(adam.epsilon);
    }
}

impl TryFrom<Section> for Optimizer {
    type Error = UnknownKey;

    fn try_from(mut section: Section) -> Result<Self, UnknownKey> {
        let (rule, schedule) = (section.take_rule(), section.take_schedule()?);
        section.check_taken(&rule)?;
        let Section { learning_rate, warmup_steps, weight_decay, gradient_clip, .. } = section;
        Ok(Self { rule, learning_rate, warmup_steps, schedule, weight_decay, gradient_clip })
    }
}

impl From<Optimizer> for Section {
    fn from(optimizer: Optimizer) -> Self {
        let Optimizer { rule, learning_rate, warmup_steps, schedule, weight_decay, gradient_clip } =
            optimizer;
        let mut section = Self {
            learning_rate,
            warmup_steps,
            schedule: match schedule {
                Schedule::Cosine { .. } => ScheduleKind::Cosine,
                Schedule::Linear { .. } => ScheduleKind::Linear,
                Schedule::Wsd { .. } => ScheduleKind::Wsd,
                Schedule::Constant => ScheduleKind::Constant,
            },
            final_learning_rate: schedule.final_learning_rate(),
            weight_decay,
            gradient_clip,
            ..Self::default()
        };
        if let Schedule::Wsd { decay_steps, .. } = schedule {
            section.decay_steps = Some(decay_steps);
        }
        section.set_rule(rule);
        section
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str =
        "learning_rate = 0.1\nwarmup_steps = 2\nweight_decay = 0.0\ngradient_clip = 1.0\n";

    fn parse(keys: &str) -> Result<Optimizer, String> {
        toml::from_str(&format!("{PLAIN}{keys}")).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn every_rule_and_schedule_reads_back() {
        for kind in ["adamw", "sgd", "lion", "muon", "lamb", "lars", "adafactor"] {
            for schedule in [
                "\"cosine\"\nfinal_learning_rate = 0.01",
                "\"linear\"\nfinal_learning_rate = 0.01",
                "\"wsd\"\nfinal_learning_rate = 0.0\ndecay_steps = 3",
                "\"constant\"",
            ] {
                let optimizer = parse(&format!("kind = \"{kind}\"\nschedule = {schedule}"));
                let optimizer = optimizer.expect("valid");
                assert_eq!(optimizer.rule.name(), kind);
                optimizer.check().expect("in range");
                let text = toml::to_string(&optimizer).expect("plain");
                assert_eq!(toml::from_str::<Optimizer>(&text).expect("valid"), optimizer);
            }
        }
    }

    #[test]
    fn a_section_without_kind_and_schedule_is_adamw_with_a_cosine() {
        let optimizer = parse("final_learning_rate = 0.01\nbeta2 = 0.95").expect("valid");
        assert_eq!(optimizer.rule, Rule::Adamw(Adam { beta2: 0.95, ..Adam::DEFAULT }));
        assert_eq!(optimizer.schedule, Schedule::Cosine { final_learning_rate: 0.01 });
    }

    #[test]
    fn a_key_of_another_rule_or_schedule_is_named() {
        for (keys, reason) in [
            ("kind = \"sgd\"\nbeta2 = 0.9", "unknown key `beta2`: kind = \"sgd\""),
            ("kind = \"lion\"\nepsilon = 0.9", "unknown key `epsilon`: kind = \"lion\""),
            ("momentum = 0.9", "unknown key `momentum`: kind = \"adamw\""),
            ("decay_steps = 9", "unknown key `decay_steps`: schedule = \"constant\""),
            ("momentun = 0.9", "unknown field `momentun`"),
            ("kind = \"adam\"", "unknown variant `adam`"),
        ] {
            let error = parse(&format!("schedule = \"constant\"\n{keys}")).expect_err("refused");
            assert!(error.contains(reason), "{error}");
        }
        let error = parse("schedule = \"wsd\"\nfinal_learning_rate = 0.0");
        assert!(error.expect_err("refused").contains("missing key `decay_steps`"));
    }

    #[test]
    fn only_the_same_rule_goes_on_with_its_state() {
        let sgd = |momentum| Rule::Sgd(Sgd { momentum, nesterov: false });
        assert!(sgd(0.9).takes_state_of(&sgd(0.5)));
        assert!(!sgd(0.9).takes_state_of(&sgd(0.0)));
        assert!(!Rule::Lamb(Adam::DEFAULT).takes_state_of(&Rule::Adamw(Adam::DEFAULT)));
    }
}
