// A real provider, for `tests/oidc/test_real_provider.py`: node oidc_provider.mjs PORT. It lets every user in.
import { generateKeyPairSync } from 'node:crypto';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import path from 'node:path';

const modules = process.env.OIDC_PROVIDER_MODULES;
const require = createRequire(path.join(modules, 'x.js'));
const { Provider, interactionPolicy } = await import(
  pathToFileURL(require.resolve('oidc-provider')).href
);

const port = Number(process.argv[2]);
const issuer = `http://127.0.0.1:${port}`;
const jwk = (type, options, more) => ({
  ...generateKeyPairSync(type, options).privateKey.export({ format: 'jwk' }),
  ...more,
});
const grants = [
  'authorization_code',
  'refresh_token',
  'urn:ietf:params:oauth:grant-type:device_code',
];
const client = (client_id, algorithm) => ({
  client_id,
  application_type: 'native',
  token_endpoint_auth_method: 'none',
  grant_types: grants,
  response_types: ['code'],
  redirect_uris: ['http://127.0.0.1/'],
  id_token_signed_response_alg: algorithm,
});

const provider = new Provider(issuer, {
  clients: [client('rs256', 'RS256'), client('es256', 'ES256')],
  jwks: {
    keys: [
      jwk('rsa', { modulusLength: 2048 }, { use: 'sig', kid: 'rsa' }),
      jwk('ec', { namedCurve: 'P-256' }, { use: 'sig', kid: 'ec' }),
    ],
  },
  claims: { openid: ['sub', 'groups'] },
  conformIdTokenClaims: false,
  cookies: { keys: ['a key of this test'] },
  features: {
    deviceFlow: { enabled: true },
    revocation: { enabled: true },
    devInteractions: { enabled: false },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => 'urn:gazette',
      useGrantedResource: () => true,
      getResourceServerInfo: (_, resource, of) => ({
        scope: 'openid',
        audience: 'gazette',
        accessTokenFormat: 'jwt',
        accessTokenTTL: 600,
        jwt: { sign: { alg: of.idTokenSignedResponseAlg } },
      }),
    },
  },
  extraTokenClaims: () => ({ groups: ['operators'] }),
  issueRefreshToken: async () => true,
  pkce: { required: () => true },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, groups: ['operators'] }) }),
  interactions: { url: (_, interaction) => `/interaction/${interaction.uid}` },
});

// In place of pages: whoever arrives is the user `ann`, and agrees.
provider.use(async (ctx, next) => {
  if (!ctx.path.startsWith('/interaction/')) return next();
  const { prompt, params, session, grantId } = await provider.interactionDetails(ctx.req, ctx.res);
  if (prompt.name === 'login') {
    await provider.interactionFinished(ctx.req, ctx.res, { login: { accountId: 'ann' } });
  } else {
    const grant = grantId
      ? await provider.Grant.find(grantId)
      : new provider.Grant({ accountId: session.accountId, clientId: params.client_id });
    grant.addOIDCScope('openid offline_access');
    grant.addResourceScope('urn:gazette', 'openid');
    await provider.interactionFinished(ctx.req, ctx.res, {
      consent: { grantId: await grant.save() },
    });
  }
  ctx.respond = false;
});
provider.on('server_error', (_, error) => console.error(error));
provider.listen(port, '127.0.0.1', () => console.log('listening'));
