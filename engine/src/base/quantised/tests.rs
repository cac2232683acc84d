//! A model that bitsandbytes has quantised, as transformers saves it (engine/tests/python/quantised.py).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype as FileDtype, SafeTensors};
use serde_json::{Value, json};
use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Dtype, Quantisation};

use super::super::{BaseFiles, ImportOptions, Imported, StageFiles, import, import_with};
use crate::model::parameters::{Parameter, all_parameters};
use crate::numeric::fused::{Bf16, Number};
use crate::numeric::nf4;
use crate::numeric::nf4::tests::fingerprint;

const CONFIG: &str = include_str!("config.json");
const MODEL: &[u8] = include_bytes!("model.safetensors");
const GOLDEN: &str = include_str!("golden.json");

type Tensors = BTreeMap<String, (FileDtype, Vec<usize>, Vec<u8>)>;

fn tensors() -> Tensors {
    let file = SafeTensors::deserialize(MODEL).expect("a file of tensors");
    let tensors = file.tensors().into_iter();
    let owned = |(name, view): (String, TensorView<'_>)| {
        (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    tensors.map(owned).collect()
}

/// Imports the model after such a change.
fn imported(
    change: impl FnOnce(&mut Value, &mut Tensors),
) -> Result<(Imported, tempfile::TempDir), String> {
    let (mut config, mut tensors) = (serde_json::from_str(CONFIG).expect("JSON"), tensors());
    change(&mut config, &mut tensors);
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("config.json"), config.to_string()).expect("writable");
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).expect("of its shape"))
    });
    let path = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path).expect("writable");
    let base = import(folder.path(), &folder.path().join("base"), false);
    base.map(|base| (base, folder)).map_err(|error| error.to_string())
}

fn refused(change: impl FnOnce(&mut Value, &mut Tensors)) -> String {
    imported(change).map(drop).expect_err("refused")
}

/// The weights of a base, and its files.
fn weights(folder: &Path, base: &Imported) -> (Vec<Parameter>, StageFiles) {
    let files = BaseFiles::in_folder(folder).expect("a base");
    files.verify().expect("whole");
    let files = StageFiles::open(&files, &files.manifest(), Stage(0)).expect("all are there");
    (all_parameters(&base.index.model), files)
}

#[test]
fn matrices_have_the_values_of_bitsandbytes() {
    let (base, folder) = imported(|_, _| {}).expect("a model");
    assert_eq!(base.index.packed, Some(Quantisation::Nf4));
    assert_eq!(base.index.config.get("quantization_config"), None);
    let golden: BTreeMap<String, String> = serde_json::from_str(GOLDEN).expect("JSON");
    let (all, files) = weights(&folder.path().join("base"), &base);
    let mut packed = 0;
    for parameter in &all {
        let section = files.section(parameter).expect("a tensor");
        assert_eq!(section.is_some(), golden.contains_key(&parameter.name), "{}", parameter.name);
        let exact = files.values(parameter).expect("values");
        let Some(section) = section else { continue };
        let narrow = nf4::values_in(Dtype::Bf16, section, parameter.len());
        let bytes: Vec<u8> =
            narrow.iter().flat_map(|value| value.to_le_bytes()[2..].to_vec()).collect();
        assert_eq!(fingerprint(&bytes), golden[&parameter.name], "{}", parameter.name);
        let rounded: Vec<f32> = exact.iter().map(|value| Bf16::store(*value).load()).collect();
        assert_eq!(rounded, narrow, "{}", parameter.name);
        packed += 1;
    }
    assert_eq!(packed, golden.len());
}

#[test]
fn what_is_not_nf4_is_named() {
    const MATRIX: &str = "model.layers.0.self_attn.q_proj.weight";
    let of = |end: &str| format!("{MATRIX}{end}");
    for (key, value) in [
        ("bnb_4bit_quant_type", json!("fp4")),
        ("bnb_4bit_use_double_quant", json!(false)),
        ("bnb_4bit_quant_storage", json!("bfloat16")),
        ("load_in_4bit", json!(false)),
        ("quant_method", json!("gptq")),
    ] {
        let error = refused(|config, _| config["quantization_config"][key] = value.clone());
        assert!(error.contains("quantization_config") && error.contains("NF4"), "{key}: {error}");
    }
    let error = refused(|_, tensors| drop(tensors.remove(&of(".nested_absmax"))));
    assert!(error.contains(".nested_absmax is missing; import the unquantised model"), "{error}");
    let error = refused(|_, tensors| tensors.get_mut(&of(".quant_map")).expect("there").2[0] = 1);
    assert!(error.contains("other levels than those of NF4"), "{error}");
    let error = refused(|_, tensors| {
        let (_, shape, data) = tensors.get_mut(&of(".absmax")).expect("there");
        data.pop();
        *shape = vec![data.len()];
    });
    assert!(error.contains("not the lengths of a matrix of [64, 64]"), "{error}");
    let error = refused(|_, tensors| {
        let (_, shape, data) = tensors.get_mut(&of(".nested_absmax")).expect("there");
        (*shape, *data) = (vec![1], f32::NAN.to_le_bytes().to_vec());
    });
    assert!(error.contains("NaN"), "{error}");
    let state = ".quant_state.bitsandbytes__nf4";
    for (from, to, expected) in [
        ("\"blocksize\": 64", "\"blocksize\": 32", "blocksize = 32 and not 64"),
        ("[64, 64]", "[64, 32]", "shape = [64,32] and not [64,64]"),
        ("nested_offset", "nested_onset", "no number nested_offset"),
        ("{", "", "no JSON"),
    ] {
        let error = refused(|_, tensors| {
            let (_, shape, data) = tensors.get_mut(&of(state)).expect("there");
            let text = String::from_utf8(data.clone()).expect("text");
            *data = text.replacen(from, to, 1).into_bytes();
            *shape = vec![data.len()];
        });
        assert!(error.contains(expected), "{error}");
    }
    // One matrix was left out of the quantisation.
    let error = refused(|_, tensors| {
        tensors.retain(|name, _| name == MATRIX || !name.starts_with(MATRIX));
        let whole = (FileDtype::BF16, vec![64, 64], vec![0; 64 * 64 * 2]);
        drop(tensors.insert(MATRIX.to_owned(), whole));
    });
    assert!(error.contains(MATRIX) && error.contains("is missing"), "{error}");
    let error =
        refused(|config, _| drop(config.as_object_mut().map(|keys| keys.remove(super::KEY))));
    assert!(error.contains("quantised"), "{error}");
}

/// A model with unquantised matrices: those of the other, in bf16.
fn unquantised() -> (tempfile::TempDir, Vec<Parameter>) {
    let (base, folder) = imported(|_, _| {}).expect("a model");
    let files = BaseFiles::in_folder(&folder.path().join("base")).expect("a base");
    let plain = folder.path().join("plain");
    super::super::export_base(&files, &plain, super::super::ExportDtype::Bf16).expect("exported");
    (folder, all_parameters(&base.index.model))
}

#[test]
fn an_import_packs_as_a_run_does() {
    let (folder, all) = unquantised();
    let [plain, packed] = [None, Some(Quantisation::Nf4)].map(|pack| {
        let name = if pack.is_some() { "packed" } else { "unpacked" };
        let (source, out) = (folder.path().join("plain"), folder.path().join(name));
        let options = ImportOptions { pack, ..ImportOptions::default() };
        import_with(&source, &out, options).expect("a model")
    });
    assert_eq!(plain.index.packed, None);
    assert_eq!(packed.index.packed, Some(Quantisation::Nf4));
    let (_, of_plain) = weights(&folder.path().join("unpacked"), &plain);
    let (_, of_packed) = weights(&folder.path().join("packed"), &packed);
    for parameter in &all {
        let values = of_plain.values(parameter).expect("values");
        let Some(section) = of_packed.section(parameter).expect("a tensor") else {
            assert_eq!(of_packed.values(parameter).expect("values"), values);
            continue;
        };
        let found = nf4::values_in(Dtype::Bf16, section, parameter.len());
        assert_eq!(found, nf4::rounded_in(Dtype::Bf16, &values), "{}", parameter.name);
    }
}
