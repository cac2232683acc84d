//! Checks of incoming messages, before any component acts on them.

use shoal_metrics::Refusal;
use shoal_protocol::frame::{Element, Frame, FrameError};
use shoal_protocol::ids::{Era, Incarnation, Member, Term};
use shoal_protocol::label::{self, Label};
use shoal_protocol::limits;
use shoal_protocol::manifest::{Manifest, NOTE};
use shoal_protocol::message::{Envelope, Message, Recalled, TensorHeader, TensorTag};
use shoal_protocol::wire::{self, WireError};

use super::payload::Tensor;

/// Why a message of a peer is not used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    /// Not the encoding of a message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A tensor that cannot be unpacked.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// Between other lives than the connected ones.
    #[error("a message between lives {from} and {to}, which are not the ones connected")]
    OtherLife {
        /// The sender's.
        from: Incarnation,
        /// The life that was meant.
        to: Incarnation,
    },
    /// From before or after a rewind.
    #[error("a message of era {era}, which is not the present one")]
    OtherEra {
        /// The era.
        era: Era,
    },
    /// From a coordinator of the past.
    #[error("a coordinator's message of term {term}, which is over")]
    PastTerm {
        /// The term.
        term: Term,
    },
    /// Tensors that do not have the run's shapes.
    #[error("tensors of another kind or shape than {what} has")]
    Shape {
        /// The kind that the tag names.
        what: &'static str,
    },
    /// Labels that are no tokens.
    #[error("labels or tokens outside of the vocabulary")]
    Label,
    /// Samples that are no pairs, in a run on pairs.
    #[error("samples that are no pairs of a chosen and a rejected sequence")]
    Pair,
}

impl Unusable {
    /// Returns the label under which it is counted.
    pub(crate) fn refusal(&self) -> Refusal {
        match self {
            Self::Wire(_) | Self::Frame(_) | Self::Shape { .. } | Self::Label | Self::Pair => {
                Refusal::Malformed
            }
            Self::OtherLife { .. } => Refusal::OtherLife,
            Self::OtherEra { .. } => Refusal::OtherEra,
            Self::PastTerm { .. } => Refusal::PastTerm,
        }
    }

    /// Returns whether no correct peer can have sent it. Otherwise it is merely late.
    pub(crate) fn is_violation(&self) -> bool {
        !matches!(self, Self::OtherLife { .. } | Self::OtherEra { .. } | Self::PastTerm { .. })
    }
}

/// The receiver of messages, and the oldest era and term that it accepts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Receiver {
    /// This peer in this life.
    pub(crate) me: Member,
    /// The era that this peer is in.
    pub(crate) era: Era,
    /// The newest term of a coordinator that this peer obeyed.
    pub(crate) term: Term,
}

/// Opens an envelope and checks its sender, receiver, era and term.
///
/// # Errors
/// When it is malformed, or between other lives, or of another era or a past term.
pub(crate) fn open(bytes: &[u8], from: Member, to: Receiver) -> Result<Envelope, Unusable> {
    let envelope: Envelope = wire::decode(bytes)?;
    // An anchor is the same voter in every life, and a joiner may know a receiver's earlier life.
    let any_life =
        matches!(envelope.message, Message::Anchor(_) | Message::CoordinatorMoved { .. });
    let meant = any_life || envelope.to == to.me.incarnation;
    if envelope.from != from.incarnation || !meant {
        return Err(Unusable::OtherLife { from: envelope.from, to: envelope.to });
    }
    let era = envelope.era;
    let fits = match &envelope.message {
        // A rewind announces the next era. The coordinator checks the era of its members itself.
        Message::FromCoordinator(_) => era >= to.era,
        Message::PeerMessage(_) => era == to.era,
        Message::ToCoordinator(_)
        | Message::Anchor(_)
        | Message::AccessList { .. }
        | Message::CheckpointRequest
        | Message::Checkpoint { .. }
        | Message::CoordinatorMoved { .. }
        | Message::Elected { .. }
        | Message::CurvesRequest
        | Message::Curves(_) => true,
    };
    if !fits {
        return Err(Unusable::OtherEra { era });
    }
    // A newcomer does not know the term yet, so only a coordinator's term is checked.
    if envelope.term < to.term && matches!(envelope.message, Message::FromCoordinator(_)) {
        return Err(Unusable::PastTerm { term: envelope.term });
    }
    Ok(envelope)
}

/// Unpacks the tensors of a message and checks them against its tag.
///
/// # Errors
/// When tag and tensors disagree, or a tensor is damaged.
pub(crate) fn unpack(
    header: &[u8],
    frames: &[Frame],
    manifest: &Manifest,
) -> Result<(TensorHeader, Vec<Tensor>), Unusable> {
    let header: TensorHeader = wire::decode(header)?;
    let tag = header.tag;
    check_shapes(&tag, frames, manifest)?;
    let tensors = frames.iter().map(Tensor::from_frame).collect::<Result<Vec<_>, FrameError>>()?;
    let has_labels = matches!(
        tag,
        TensorTag::Activation { .. } | TensorTag::Recalled { input: Recalled::Activation, .. }
    );
    if let (true, [_, labels, ..]) = (has_labels, tensors.as_slice()) {
        check_words(&labels.bytes, manifest)?;
    }
    Ok((header, tensors))
}

/// Checks the words beside an activation: labels, perhaps of pairs, and perhaps the tokens of the samples.
fn check_words(bytes: &[u8], manifest: &Manifest) -> Result<(), Unusable> {
    let words: Vec<u32> =
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let (row_words, vocabulary) = (manifest.words_of_row() as usize, manifest.model.vocabulary);
    let of_labels = row_words * manifest.training.microbatch_size as usize;
    let (labels, tokens) = words.split_at(of_labels.min(words.len()));
    let is_of_pairs = manifest.training.loss.preference().is_some();
    for row in labels.chunks(row_words) {
        let (labels, behind) = row.split_at(row.len().min(manifest.model.context as usize));
        let labels: Vec<Label> = labels.iter().map(|word| Label::from_word(*word)).collect();
        if labels.iter().filter_map(|label| label.target).any(|id| id >= vocabulary) {
            return Err(Unusable::Label);
        }
        let has_reference = match *behind {
            [] => true,
            [chosen, rejected] => label::reference_of([chosen, rejected]).is_some(),
            _ => false,
        };
        if is_of_pairs && (label::pair_of(&labels).is_none() || !has_reference) {
            return Err(Unusable::Pair);
        }
    }
    match tokens.iter().any(|id| *id >= vocabulary) {
        true => Err(Unusable::Label),
        false => Ok(()),
    }
}

/// Checks shapes before tensors are unpacked, so that no larger one is allocated.
fn check_shapes(tag: &TensorTag, frames: &[Frame], manifest: &Manifest) -> Result<(), Unusable> {
    let shape = manifest.boundary_shape();
    let is = |frame: &Frame, element: Element, shape: &[u32]| {
        frame.element() == element && frame.shape() == shape
    };
    let codecs = &manifest.codec;
    let piece = |frame: &Frame, element: Element| {
        let length = frame.shape().iter().map(|size| *size as usize).product::<usize>();
        frame.element() == element
            && frame.shape().len() == 1
            && length <= limits::ROUND_PIECE_ELEMENTS
    };
    let is_note = |frame: &Frame| is(frame, Element::U8, &[NOTE as u32]);
    let is_activation = |activation: &Frame, labels: &Frame| {
        is(activation, codecs.activations.into(), &shape)
            && is(labels, Element::U32, &manifest.label_shape())
    };
    let is_gradient = |gradient: &Frame| is(gradient, codecs.activation_gradients.into(), &shape);
    let (notes, ends) = match tag {
        TensorTag::Activation { key, exchange }
        | TensorTag::ActivationGradient { key, exchange } => {
            let exchanges = manifest.exchanges_of(key.microbatch);
            (exchanges > 1, exchanges > 1 && exchange.0 == exchanges - 1)
        }
        _ => (false, false),
    };
    let (fits, what) = match (tag, frames) {
        (TensorTag::Activation { .. } | TensorTag::ActivationGradient { .. }, [note]) if ends => {
            (is_note(note), "the end of a virtual worker")
        }
        (TensorTag::Activation { .. }, [activation, labels]) if !notes => {
            (is_activation(activation, labels), "an activation")
        }
        (TensorTag::Activation { .. }, [activation, labels, note]) if notes && !ends => {
            (is_activation(activation, labels) && is_note(note), "a virtual worker's activation")
        }
        (TensorTag::ActivationGradient { .. }, [gradient]) if !notes => {
            (is_gradient(gradient), "an activation gradient")
        }
        (TensorTag::ActivationGradient { .. }, [gradient, note]) if notes && !ends => {
            (is_gradient(gradient) && is_note(note), "a virtual worker's activation gradient")
        }
        (TensorTag::Recalled { input: Recalled::Activation, .. }, [activation, labels]) => {
            (is_activation(activation, labels), "an activation to audit")
        }
        (TensorTag::Recalled { input: Recalled::Gradient, .. }, [gradient]) => {
            (is_gradient(gradient), "a gradient to audit")
        }
        (TensorTag::RoundPart { .. }, [part]) => {
            (piece(part, codecs.all_reduce.part()), "a round's part")
        }
        (TensorTag::RoundResult { .. }, [part]) => {
            (piece(part, codecs.all_reduce.result()), "a round's result")
        }
        _ => (false, "its tag"),
    };
    if fits { Ok(()) } else { Err(Unusable::Shape { what }) }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::codec::packing::Packing;
    use shoal_protocol::ids::{ClaimKey, Exchange, Microbatch, PeerId, Stage, Step};
    use shoal_protocol::manifest::{
        Boundary, BoundaryKind, DistanceCodec, InnerLoop, InnerMoments, Loss, Preference,
        PreferenceKind,
    };
    use shoal_protocol::message::{FromCoordinator, PeerMessage};
    use shoal_scheduler::sim::Scenario;

    use super::*;

    fn member(number: u8, life: u64) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(life) }
    }

    /// A peer in its third life, in era 2, that obeyed a coordinator of term 5.
    fn receiver() -> Receiver {
        Receiver { me: member(0, 3), era: Era(2), term: Term(5) }
    }

    /// Opens a message from the second life of another peer.
    fn opened(change: impl FnOnce(&mut Envelope), message: Message) -> Result<(), Refusal> {
        let (from, to) = (Incarnation(2), Incarnation(3));
        let mut envelope = Envelope { from, to, era: Era(2), term: Term(5), message };
        change(&mut envelope);
        let bytes = wire::encode(&envelope).expect("small");
        open(&bytes, member(1, 2), receiver()).map(|_| ()).map_err(|error| error.refusal())
    }

    fn offer() -> Message {
        let key = ClaimKey { step: Step(1), stage: Stage(1), microbatch: Microbatch(0) };
        Message::PeerMessage(PeerMessage::Evaluated { key })
    }

    fn finished() -> Message {
        Message::FromCoordinator(FromCoordinator::Finished)
    }

    #[test]
    fn messages_of_other_lives_and_eras_are_refused() {
        assert_eq!(opened(|_| {}, offer()), Ok(()));
        assert_eq!(opened(|e| e.from = Incarnation(1), offer()), Err(Refusal::OtherLife));
        assert_eq!(opened(|e| e.to = Incarnation(2), offer()), Err(Refusal::OtherLife));
        assert_eq!(opened(|e| e.era = Era(1), offer()), Err(Refusal::OtherEra));
        assert_eq!(opened(|e| e.era = Era(3), offer()), Err(Refusal::OtherEra));
    }

    #[test]
    fn a_coordinator_may_be_ahead_and_never_behind() {
        assert_eq!(opened(|e| e.era = Era(3), finished()), Ok(()));
        assert_eq!(opened(|e| e.era = Era(1), finished()), Err(Refusal::OtherEra));
        assert_eq!(opened(|e| e.term = Term(6), finished()), Ok(()));
        assert_eq!(opened(|e| e.term = Term(4), finished()), Err(Refusal::PastTerm));
    }

    #[test]
    fn bytes_that_are_no_message_are_malformed() {
        let error = open(&[255; 40], member(1, 2), receiver()).expect_err("no message");
        assert_eq!(error.refusal(), Refusal::Malformed);
    }

    #[test]
    fn a_tensor_at_a_boundary_is_as_wide_as_the_manifest_says() {
        let mut manifest = Scenario::small_manifest(2, 1, 1);
        manifest.model.hidden = 8;
        manifest.model.boundary = Some(Boundary { kind: BoundaryKind::Maxout, width: 4 });
        let [samples, tokens, _] = manifest.boundary_shape();
        let key = ClaimKey { step: Step(0), stage: Stage(0), microbatch: Microbatch(0) };
        let tag = wire::encode(&TensorHeader::from(TensorTag::ActivationGradient {
            key,
            exchange: Exchange(0),
        }))
        .expect("small");
        let gradient = |width: u32| {
            let bytes = vec![0; 4 * (samples * tokens * width) as usize];
            let shape = [samples, tokens, width];
            let frame = Frame::pack(Element::F32, &shape, bytes.into(), Packing::Raw);
            unpack(&tag, &[frame.expect("small")], &manifest)
        };
        assert!(gradient(4).is_ok());
        for width in [2, 8] {
            assert!(matches!(gradient(width), Err(Unusable::Shape { .. })), "{width}");
        }
    }

    #[test]
    fn an_activation_in_a_subspace_comes_with_known_tokens() {
        let mut manifest = Scenario::small_manifest(2, 1, 1);
        manifest.model.hidden = 8;
        manifest.model.boundary = Some(Boundary { kind: BoundaryKind::Subspace, width: 4 });
        let [rows, tokens] = manifest.label_shape();
        let key = ClaimKey { step: Step(0), stage: Stage(1), microbatch: Microbatch(0) };
        let tag =
            wire::encode(&TensorHeader::from(TensorTag::Activation { key, exchange: Exchange(0) }))
                .expect("small");
        let frame = |element, shape: &[u32], bytes: Vec<u8>| {
            Frame::pack(element, shape, bytes.into(), Packing::Raw).expect("small")
        };
        let activation = |rows: u32, last: u32| {
            let shape = manifest.boundary_shape();
            let numbers = vec![0; 4 * shape.iter().product::<u32>() as usize];
            let mut words = vec![0; 4 * (rows * tokens) as usize];
            let end = words.len();
            words[end - 4..].copy_from_slice(&last.to_le_bytes());
            let labels = frame(Element::U32, &[rows, tokens], words);
            unpack(&tag, &[frame(Element::F32, &shape, numbers), labels], &manifest).map(|_| ())
        };
        let vocabulary = manifest.model.vocabulary;
        assert!(activation(rows, vocabulary - 1).is_ok());
        assert!(matches!(activation(rows, vocabulary), Err(Unusable::Label)));
        assert!(matches!(activation(rows / 2, 0), Err(Unusable::Shape { .. })));
    }

    #[test]
    fn samples_of_a_run_on_pairs_are_pairs_with_a_reference() {
        let mut manifest = Scenario::small_manifest(2, 1, 1);
        let preference = Preference { kind: PreferenceKind::Dpo, beta: 0.1, gamma: 0.0 };
        manifest.training.loss = Loss::Preference(preference);
        let context = manifest.model.context as usize;
        let label = |starts_document| Label { starts_document, ..Label::of(1) }.to_word();
        let checked = |second: Option<usize>, reference: [f32; 2]| {
            let row = (0..context).map(|place| label(place == 0 || Some(place) == second));
            let row: Vec<u32> = row.chain(reference.map(f32::to_bits)).collect();
            let rows = row.repeat(manifest.training.microbatch_size as usize);
            let bytes: Vec<u8> = rows.into_iter().flat_map(u32::to_le_bytes).collect();
            check_words(&bytes, &manifest)
        };
        assert!(checked(Some(2), [-1.0, -2.0]).is_ok());
        assert!(matches!(checked(None, [-1.0, -2.0]), Err(Unusable::Pair)));
        assert!(matches!(checked(Some(2), [-1.0, f32::NAN]), Err(Unusable::Pair)));
    }

    #[test]
    fn a_tensor_of_a_worker_has_a_note_and_its_end_nothing_else() {
        let mut manifest = Scenario::small_manifest(2, 1, 1);
        let optimizer = manifest.optimizer.clone();
        let (codec, moments) = (DistanceCodec::F32, InnerMoments::Zero);
        let inner = InnerLoop { steps: 1, microbatches: 1, optimizer, codec, moments, overlap: 0 };
        manifest.inner = Some(inner);
        let note = || {
            let bytes = vec![0; NOTE].into();
            Frame::pack(Element::U8, &[NOTE as u32], bytes, Packing::Raw).expect("small")
        };
        let gradient = || {
            let shape = manifest.boundary_shape();
            let bytes = vec![0; 4 * shape.iter().product::<u32>() as usize].into();
            Frame::pack(Element::F32, &shape, bytes, Packing::Raw).expect("small")
        };
        let key = ClaimKey { step: Step(0), stage: Stage(0), microbatch: Microbatch(0) };
        let unpacked = |exchange, frames: &[Frame]| {
            let tag = TensorTag::ActivationGradient { key, exchange: Exchange(exchange) };
            unpack(&wire::encode(&TensorHeader::from(tag)).expect("small"), frames, &manifest)
                .is_ok()
        };
        assert!(unpacked(0, &[gradient(), note()]) && unpacked(1, &[note()]));
        assert!(!unpacked(0, &[gradient()]) && !unpacked(0, &[note()]));
        assert!(!unpacked(1, &[gradient(), note()]) && !unpacked(u32::MAX, &[note()]));
        assert!(!unpacked(0, &[gradient(), gradient()]));
    }
}
