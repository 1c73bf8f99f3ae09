"""Who may listen where: nothing that others can reach is open by accident."""

from __future__ import annotations

import subprocess

import pytest

from trm_jax.serve import Access, Connection, Limits, SampleRequest, SamplingOptions

TOKEN = "a-token-of-25-characters."


def make_identity(directory):
    certificate, key = directory / "certificate", directory / "key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return make_identity(tmp_path_factory.mktemp("identity"))


@pytest.fixture
def files(tmp_path, identity):
    certificate, key = identity
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    return {"certificate": certificate, "key": key, "token_file": token}


def test_an_open_address_needs_tls_and_a_token_or_a_word_that_it_may_be_open(files):
    for host in ("0.0.0.0", "::", "10.1.2.3", "rollouts.example"):
        with pytest.raises(ValueError, match="TLS certificate and key and a token file is missing"):
            Access(host=host)
        with pytest.raises(ValueError, match="and a token file is missing"):
            Access(host=host, certificate=files["certificate"], key=files["key"])
        with pytest.raises(ValueError, match="and a TLS certificate and key is missing"):
            Access(host=host, token_file=files["token_file"])
        assert Access(host=host, **files).token() == TOKEN
        assert Access(host=host, insecure=True).token() is None
    for host in ("127.0.0.1", "::1", "localhost", "127.5.0.1"):
        assert Access(host=host).token() is None
    assert Access(host="::1", port=5).address == "[::1]:5"


def test_half_an_identity_and_a_poor_token_are_refused(files, tmp_path):
    with pytest.raises(ValueError, match="both a certificate and its key"):
        Access(certificate=files["certificate"])
    files["token_file"].chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        Access(token_file=files["token_file"])
    files["token_file"].chmod(0o600)
    files["token_file"].write_text("short")
    with pytest.raises(ValueError, match="at least 16"):
        Access(token_file=files["token_file"])
    with pytest.raises(ValueError, match="cannot read"):
        Access(token_file=tmp_path / "absent")
    with pytest.raises(ValueError, match="port=70000"):
        Access(port=70000)


def test_files_that_are_no_identity_are_refused_before_a_server_starts(files, tmp_path):
    """gRPC would say that it cannot listen, and a client wait until its patience ends."""
    garbage = tmp_path / "garbage"
    garbage.write_text("pem")
    _, other_key = make_identity(tmp_path)
    for certificate, key in ((garbage, garbage), (files["certificate"], other_key), (tmp_path / "absent", other_key)):
        with pytest.raises(ValueError, match=r"are no TLS identity \(.*belong together"):
            Access(certificate=certificate, key=key)
    locked = tmp_path / "locked"
    command = ["openssl", "ec", "-in", str(other_key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ValueError, match="the key without a password"):
        Access(certificate=tmp_path / "certificate", key=locked)
    for authority in (garbage, tmp_path / "absent"):
        with pytest.raises(ValueError, match="is no PEM file of an authority"):
            Connection(target="127.0.0.1:80", certificate=authority)
    Connection(target="rollouts.example:80", certificate=files["certificate"], token=TOKEN)


def test_a_client_sends_no_token_unencrypted_over_a_network():
    with pytest.raises(ValueError, match="in the clear"):
        Connection(target="rollouts.example:80", token=TOKEN)
    Connection(target="127.0.0.1:80", token=TOKEN)
    with pytest.raises(ValueError, match="concurrency"):
        Connection(target="127.0.0.1:80", concurrency=0)


GOOD = {"prompt": [0, 8], "seeds": [0], "max_tokens": 4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "0 tokens"),
        ({"prompt": [1, 2, 3]}, "3 tokens; the engine takes 1 to 2"),
        ({"prompt": [1, 9]}, r"position 1: token id 9 is outside the vocabulary \[0, 9\)"),
        ({"prompt": [-1]}, "token id -1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 5}, r"must lie in 1..4"),
        ({"seeds": []}, "0 seeds"),
        ({"seeds": [1, 2, 3]}, "3 seeds: a request has 1 to 2"),
        ({"seeds": [2**32]}, "seed 4294967296"),
        ({"stream_every": -1}, "stream_every=-1"),
        ({"hidden": True}, "hidden states"),
        ({"top_logps": 4}, "top_logps=4: this server records 0 to 3"),
        ({"top_logps": -1}, "top_logps=-1"),
        ({"routes": True}, "experts were asked for"),
        ({"sampling": SamplingOptions(stop=("a",))}, "no tokenizer"),
    ],
)
def test_a_request_beyond_the_limits_is_refused_and_says_why(change, words):
    limits = Limits(prompt=2, response=4, vocab_size=9, samples=2, hidden=False, top_logps=3)
    limits.check(SampleRequest(**GOOD, top_logps=3))
    with pytest.raises(ValueError, match=words):
        limits.check(SampleRequest(**GOOD | change))


def test_a_request_has_so_many_stop_strings_and_no_more():
    limits = Limits(prompt=2, response=4, vocab_size=9, samples=2, hidden=False, stop=True)
    limits.check(SampleRequest(**GOOD, sampling=SamplingOptions(stop=("a",) * 16)))
    with pytest.raises(ValueError, match="17 stop strings"):
        limits.check(SampleRequest(**GOOD, sampling=SamplingOptions(stop=("a",) * 17)))


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"top_k": -1},
    ],
)
def test_an_option_out_of_range_is_refused_by_name(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        SamplingOptions(**option)
